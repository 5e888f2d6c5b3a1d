"""Byte and byte-pair tokenizers, against tiktoken itself on published vocabularies."""

from __future__ import annotations

import base64
import importlib.util
import pickle
import time
from pathlib import Path

import pytest
import tiktoken

from titanforge.data import build_tokenizer
from titanforge.data.tokenizers.pieces import CHUNK, LONGEST_RUN
from titanforge.data.tokenizers.ranks import FAMILIES

SAMPLES = [
    "hello world",
    "Hello, World! It's 12345 o'clock.\n\n\tdef f(x):\r\n        return x  ",
    "Größe, 東京, naïve café, 👩‍👩‍👧, \u0301 combining",
    "   \n \n\n x\n",
    "<|begin_of_text|><|end_of_text|><|endoftext|><|im_start|>",
    "",
]


def package_file(package: str, file: str) -> Path:
    """A file of an installed package, found without running the package's code."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the vocabulary inside the PyPI package that provides {package}/{file}")
    path = Path(spec.submodule_search_locations[0], file)
    assert path.is_file()
    return path


@pytest.fixture(scope="module", params=["llama3", "qwen"])
def vocabulary(request):
    """(our tokenizer, tiktoken's own encoding of the same file)"""
    if request.param == "llama3":
        path = package_file("llama_models", "llama3/tokenizer.model")
    else:
        path = package_file("dashscope", "resources/qwen.tiktoken")
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())
    }
    family = FAMILIES[len(ranks)]
    assert family.name == request.param
    plain = tiktoken.Encoding("plain", pat_str=family.pattern, mergeable_ranks=ranks, special_tokens={})
    return build_tokenizer(str(path)), plain


def test_bytes_are_lossless():
    byte = build_tokenizer("byte")
    assert (byte.vocab_size, byte.bos_id, byte.eos_id) == (258, 256, 257)
    for text in [*SAMPLES, "".join(map(chr, range(0x300)))]:
        ids = byte.encode(text)
        assert ids == list(text.encode()) == byte.encode_array(text).tolist()
        assert byte.decode(ids) == text
    assert byte.decode([104, 105, 257, 999, 0xFF]) == "hi<|eos|>\ufffd\ufffd"
    assert byte.decode(byte.encode("a\ud800b")) == "a\ufffdb"


def test_known_ids_of_llama3():
    llama = build_tokenizer(str(package_file("llama_models", "llama3/tokenizer.model")))
    assert llama.encode("hello world") == [15339, 1917]
    assert llama.encode("This is a test sentence.") == [2028, 374, 264, 1296, 11914, 13]
    assert (llama.vocab_size, llama.bos_id, llama.eos_id) == (128_256, 128_000, 128_001)
    assert llama.decode([128_000, 15339, 1917, 128_009, 128_255]) == (
        "<|begin_of_text|>hello world<|eot_id|><|reserved_special_token_245|>"
    )


def test_known_ids_of_qwen():
    qwen = build_tokenizer(str(package_file("dashscope", "resources/qwen.tiktoken")))
    assert qwen.encode("hello world") == [14990, 1879]
    assert qwen.encode("12") == [16, 17]  # digits one by one
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")  # NFC
    assert (qwen.vocab_size, qwen.eos_id) == (151_851, 151_643)
    assert qwen.decode([151_644]) == "<|im_start|>"


def test_text_is_encoded_as_tiktoken_does_and_comes_back(vocabulary):
    tokenizer, plain = vocabulary
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        if "\u0301" not in text:
            assert ids == plain.encode_ordinary(text)
            assert tokenizer.decode(ids) == text
    assert tokenizer.decode([10**7]) == "\ufffd"


def test_names_of_special_tokens_in_a_document_stay_text(vocabulary):
    tokenizer, plain = vocabulary
    for text in ("<|begin_of_text|>", "a<|end_of_text|>b", "<|endoftext|>", "<|eot_id|>"):
        ids = tokenizer.encode(text)
        assert max(ids) < plain.n_vocab and len(ids) > 3
        assert tokenizer.decode(ids) == text


def test_chunks_of_a_long_document_change_no_token(vocabulary):
    tokenizer, plain = vocabulary
    text = Path(__file__).read_text(encoding="utf-8").replace("\u0301", "") * (3 * CHUNK // 5000)
    assert len(text) > 2 * CHUNK
    assert tokenizer.encode(text) == plain.encode_ordinary(text)


@pytest.mark.parametrize("run", ["a", " ", "\n", "=", "東", "7", "a1", " \t"])
def test_monotonous_documents_are_no_trap(vocabulary, run):
    """Runs without a break make the pattern recurse and the merges quadratic."""
    tokenizer, _ = vocabulary
    text = run * (500_000 // len(run))
    begin = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - begin < 20
    assert tokenizer.decode(ids) == text


def test_runs_are_cut_at_their_limit_only(vocabulary):
    tokenizer, plain = vocabulary
    head = "x" * LONGEST_RUN
    assert tokenizer.encode(head + "yz end") == plain.encode_ordinary(head) + plain.encode_ordinary("yz end")


def test_a_tokenizer_survives_the_way_to_a_worker(vocabulary):
    tokenizer, _ = vocabulary
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.name == tokenizer.name and again.encode("as it was") == tokenizer.encode("as it was")


def test_auto_looks_into_the_assets_folder(tmp_path):
    assert build_tokenizer("auto", "").name == "byte"
    with pytest.raises(FileNotFoundError, match=r"model\.hf_assets_path = '/no/such/place'"):
        build_tokenizer("auto", "/no/such/place")
    with pytest.raises(FileNotFoundError, match="no tokenizer file there"):
        build_tokenizer("auto", str(tmp_path))
    llama = package_file("llama_models", "llama3/tokenizer.model")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").symlink_to(llama)
    assert build_tokenizer("auto", str(tmp_path)).name.startswith("llama3-")
    assert build_tokenizer(str(tmp_path)).name.startswith("llama3-")
    for name in ("a.tiktoken", "b.tiktoken"):
        (tmp_path / name).symlink_to(llama)
    with pytest.raises(ValueError, match=r"several \*\.tiktoken files \(a\.tiktoken, b\.tiktoken\)"):
        build_tokenizer("auto", str(tmp_path))
    (tmp_path / "tokenizer.model").symlink_to(llama)
    assert build_tokenizer("auto", str(tmp_path)).name.startswith("llama3-")
    (tmp_path / "tokenizer.json").write_text("{}")  # comes before all others
    with pytest.raises(ValueError, match=r"tokenizer\.json: no model\.vocab in it"):
        build_tokenizer("auto", str(tmp_path))


def test_a_file_inside_an_installed_package():
    package_file("llama_models", "llama3/tokenizer.model")
    assert build_tokenizer("package:llama_models/llama3/tokenizer.model").name.startswith("llama3-")
    with pytest.raises(FileNotFoundError, match="the package 'llama_models' holds no 'llama3/none'"):
        build_tokenizer("package:llama_models/llama3/none")
    for name in ("no_such_package_here", "not-a-name", "", "textwrap"):
        with pytest.raises(FileNotFoundError, match="no Python package"):
            build_tokenizer(f"package:{name}/a")


def test_files_of_other_kinds_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: no model\.vocab in it"):
        build_tokenizer(str(path))
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00 \xc1")
    with pytest.raises(ValueError, match="line 2: not a tiktoken rank file"):
        build_tokenizer(str(path))
    path.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    with pytest.raises(ValueError, match=r"256 ranks; known vocabularies: llama3 \(128000\), qwen"):
        build_tokenizer(str(path))
    path.write_bytes(b"IQ== 0\nIg== 2\n")
    with pytest.raises(ValueError, match=r"ranks are not 0 … 1"):
        build_tokenizer(str(path))
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer = 'bytes'"):
        build_tokenizer("bytes")
