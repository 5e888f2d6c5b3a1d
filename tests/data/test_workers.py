"""Real worker processes: the same data as without, failures that say what failed, signals survived."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.data.corpus import loader, ranks, step, texts, write_jsonl
from titanforge.data import DataError, merge_states


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", texts())


def test_workers_change_nothing_and_what_they_load_ahead_is_not_counted(path):
    reference = loader(path)
    state = merge_states([reference.state_dict()])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for world, workers, prefetch in [(1, 3, 5), (2, 1, None)]:
        loaders = ranks(path, world, num_workers=workers, prefetch_factor=prefetch)
        for each in loaders:
            each.load_state_dict(state)
        for _ in range(8):
            assert step(loaders) == step([reference])
        state = merge_states([each.state_dict() for each in loaders])
        assert torch.equal(state["streams"], reference.state_dict()["streams"])
        for each in loaders:
            each.close()
    # Starting workers drew nothing from the generator that weights and dropout come from.
    assert torch.equal(before, torch.get_rng_state())


def test_a_micro_batch_is_the_same_bit_for_bit_and_closing_needs_no_garbage_collector(path):
    alone, helped = loader(path), loader(path, num_workers=2, persistent_workers=True)
    gc.disable()
    try:
        for _ in range(30):
            for a, b in zip(next(alone), next(helped), strict=True):
                assert torch.equal(a, b)
        assert len(torch.multiprocessing.active_children()) == 2
        helped.close()
        assert not torch.multiprocessing.active_children()
    finally:
        gc.enable()


def test_a_broken_record_in_a_worker_is_named_in_time(tmp_path):
    lines = [f'{{"text": "document {i} of the corpus"}}' for i in range(300)]
    lines[270] = '{"txt": "no such field"}'
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    settings = {"num_streams": 1, "shuffle": False, "global_batch_size": 2}
    alone, helped = loader(str(path), **settings), loader(str(path), num_workers=1, **settings)
    counts = []
    for each in (alone, helped):
        counts.append(0)
        with pytest.raises(
            DataError, match=r"broken\.jsonl, line 271: no field 'text' \(data\.text_key\)"
        ) as caught:
            while True:
                next(each)
                counts[-1] += 1
        assert "Traceback" not in str(caught.value)
    assert counts[0] == counts[1] > 100


def test_a_worker_outlives_the_signals_that_stop_a_run_and_its_death_is_told(path):
    one = loader(path, num_workers=1, prefetch_factor=1)
    next(one)
    (worker,) = torch.multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.3)
    for _ in range(20):
        next(one)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="worker of rank 0 has died"):
        for _ in range(20):
            next(one)


UNCLOSED = """
import sys
from tests.data.corpus import loader
if __name__ == "__main__":
    one = loader(sys.argv[1], num_workers=1, persistent_workers=True)
    next(one)
    raise SystemExit(7)
"""


def test_a_process_that_never_closed_its_loader_ends(path, tmp_path):
    script = tmp_path / "unclosed.py"
    script.write_text(UNCLOSED)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, script, path], env=environment, timeout=60).returncode == 7


DIGEST = """
import hashlib, sys
from titanforge.data import build_tokenizer, build_train_loader
loader = build_train_loader(
    dataset=sys.argv[1], dataset_path=sys.argv[2] or None, text_key="text", tokenizer=build_tokenizer("byte"),
    seq_len=64, local_batch_size=4, global_batch_size=-1, dp_rank=0, dp_world=1, seed=0, num_streams=8,
    shuffle=True, repeat=True, document_mask=True, validation_fraction=0.1)
digest = hashlib.sha256()
for _ in range(20):
    digest.update(next(loader).tokens.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("dataset", ["python_stdlib", "text"])
def test_the_order_depends_neither_on_hash_seed_nor_locale_nor_listing(dataset, tmp_path):
    paths = []
    for turn in (1, -1):  # the same files, created in opposite orders
        folder = tmp_path / str(turn)
        folder.mkdir()
        for name in ["b.txt", "B.txt", "ä.md", "Z.py", "a-1.txt", "a_1.txt"][::turn]:
            (folder / name).write_text(f"the text of {name} " * 20, encoding="utf-8")
        paths.append(str(folder) if dataset == "text" else "")
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST, dataset, path],
            env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONUTF8": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for path, seed, locale in zip(paths, ("1", "2"), ("C", "C.UTF-8"))
    ]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert outputs[0] == outputs[1] != ""
