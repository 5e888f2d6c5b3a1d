"""What the trainer, FSDP, pipelines and checkpoints rely on, for every kind of model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.families import KINDS, batch, tiny
from titanforge.models.generation import generate
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanforge.parallelisms.compile import apply_compile
from titanforge.parallelisms.data_parallel import apply_mixed_precision

PARAMETERS = {
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("qwen3", "235B-A22B"): 235_093_634_560,
    ("gpt2", "124M"): 124_439_808,
    ("gpt2", "355M"): 354_823_168,
    ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1.56B"): 1_557_611_200,
}
_ATTENTION = [f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")]
_NORMS = ["attention_norm.weight", "ffn_norm.weight"]
_QK_NORMS = ["attention.q_norm.weight", "attention.k_norm.weight"]
_SWIGLU = [f"feed_forward.w{i}.weight" for i in (1, 2, 3)]
_GPT2 = ["attention_norm", "attention.wqkv", "attention.wo", "ffn_norm", "feed_forward.w1", "feed_forward.w2"]
BLOCKS = {
    "llama3": [*_NORMS, *_ATTENTION, *_SWIGLU],
    "qwen3": [*_NORMS, *_ATTENTION, *_QK_NORMS, *_SWIGLU],
    "qwen3_tied": [*_NORMS, *_ATTENTION, *_QK_NORMS, *_SWIGLU],
    "qwen3_moe": [
        *_NORMS,
        *_ATTENTION,
        *_QK_NORMS,
        "feed_forward.router.weight",
        *(f"feed_forward.experts.w{i}" for i in (1, 2, 3)),
    ],
    "gpt2": [f"{name}.{part}" for name in _GPT2 for part in ("weight", "bias")],
    "gpt2_modern": [*_NORMS, *_ATTENTION, "feed_forward.w1.weight", "feed_forward.w2.weight"],
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("family", "flavor"), PARAMETERS)
def test_published_parameter_counts(family, flavor):
    with torch.device("meta"):
        model, args = build_model(family, flavor, seq_len=1024)
    assert sum(model.num_parameters().values()) == PARAMETERS[family, flavor]
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[family, flavor]
    assert args.tie_embeddings == (flavor in ("0.6B", "1.7B", "4B") or family == "gpt2")


@pytest.mark.parametrize(
    ("flavor", "billions"),
    # Dobb, appendix G: 3.13, 5.79 (5.796, cut off) and 8.14; CurvaDion: 619 MB (MiB) in float32 for its 160M
    [
        ("3B", 3.13),
        ("6B", 5.80),
        ("8B", 8.14),
        ("modern-160M", 0.16),
        ("modern-350M", 0.35),
        ("modern-1.3B", 1.31),
    ],
)
def test_sizes_of_the_papers(flavor, billions):
    with torch.device("meta"):
        model, _ = build_model("gpt2", flavor, seq_len=1024)
    total = sum(p.numel() for p in model.parameters())
    assert round(total / 1e9, 2) == billions
    if flavor == "modern-160M":
        assert round(total * 4 / 2**20) == 619


@each_kind
def test_state_dict_has_the_known_names_and_no_tables(kind):
    names = set(tiny(kind, n_layers=1).state_dict())
    expected = {f"layers.0.{name}" for name in BLOCKS[kind]}
    expected |= {"tok_embeddings.weight", "norm.weight", "output.weight"}
    if kind == "gpt2":
        expected |= {"pos_embeddings.weight", "norm.bias"}
    assert names == expected


@each_kind
def test_forms_of_forward_agree(kind):
    model = tiny(kind)
    tokens, labels = batch()
    hidden = model(tokens)
    assert hidden.shape == (2, 12, 32)
    torch.testing.assert_close(model.loss_sum(hidden, labels), model(tokens, labels=labels))
    torch.testing.assert_close(model.logits(hidden)[:, 7], model(tokens, logits_at=7))
    positions = torch.arange(12).expand(2, 12)
    torch.testing.assert_close(model(tokens, positions), hidden)
    torch.testing.assert_close(model(tokens, positions, torch.zeros_like(tokens)), hidden)
    with pytest.raises(ValueError, match="17 tokens; the model was built for 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


@each_kind
def test_packed_documents_equal_documents_run_alone(kind):
    changes = {"moe_balancing": "none"} if kind == "qwen3_moe" else {}  # the term is about a whole batch
    model = tiny(kind, **changes)
    tokens, labels = batch(B=2, T=12)
    cuts = [[0, 5, 12], [0, 1, 9, 12]]
    positions, ids, alone = torch.zeros_like(tokens), torch.zeros_like(tokens), torch.zeros(())
    for row, edges in enumerate(cuts):
        for number, (a, b) in enumerate(itertools.pairwise(edges)):
            positions[row, a:b] = torch.arange(b - a)
            ids[row, a:b] = number
            alone = alone + model(tokens[row : row + 1, a:b], labels=labels[row : row + 1, a:b])
    alone.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = model(tokens, positions, ids, labels)
    loss.backward()
    torch.testing.assert_close(loss, alone)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    assert abs(model(tokens, positions, None, labels) - alone) > 0.01


@each_kind
def test_pipeline_stages_compose_to_the_whole(kind):
    if kind == "qwen3_tied":
        pytest.skip("a tied head cannot lie on another stage than its embedding")
    changes = {"tie_embeddings": False} if kind == "gpt2" else {}
    whole, first, second = (tiny(kind, **changes) for _ in range(3))
    first.norm = first.output = None
    del first.layers["1"]
    second.tok_embeddings = None
    if kind == "gpt2":
        second.pos_embeddings = None
    del second.layers["0"]
    tokens, labels = batch()
    positions = torch.arange(12).flip(0).expand(2, 12)
    expected = whole(tokens, positions, None, labels)
    torch.testing.assert_close(second(first(tokens, positions), positions, None, labels), expected)
    for model in (first, second, whole):
        initialize_weights(model, seed=3)
    torch.testing.assert_close(second(first(tokens), labels=labels), whole(tokens, labels=labels))
    with pytest.raises(RuntimeError, match="no output head"):
        first(tokens, labels=labels)


@each_kind
def test_parameter_groups_add_up_and_flops_equal_the_counted_ones(kind):
    model = tiny(kind)
    assert sum(model.num_parameters().values()) == sum(p.numel() for p in model.parameters())
    B, T, args = 2, 16, model.args
    tokens, labels = batch(B=B, T=T)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=labels).backward()
    # The plain kernel works out all T² pairs, of which T (T + 1) / 2 are causal: 12 per pair and channel.
    width = args.n_heads * args.head_dim
    extra = 12 * B * args.n_layers * width * (T * T - T * (T + 1) / 2)
    if kind == "qwen3_moe":
        # Summing the k experts' outputs is a product for the counter; the loop over experts is not.
        sent = B * T * args.n_experts_per_token
        extra += args.n_layers * (3 * 2 * sent * args.dim - 3 * 2 * sent * 3 * args.dim * args.hidden_dim)
    assert counter.get_total_flops() == model.flops_per_token(T) * B * T + extra


@each_kind
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_compile_whole_and_recompute(kind, recompute):
    torch._dynamo.reset()
    model, plain = tiny(kind), tiny(kind)
    tokens, labels = batch()
    ids = torch.arange(12).expand(2, 12) // 5
    apply_activation_checkpoint(model, recompute)
    apply_compile(model, "aot_eager")
    loss = model(tokens, None, ids, labels)
    loss.backward()
    expected = plain(tokens, None, ids, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    if kind == "qwen3_moe":
        torch.testing.assert_close(model.load, plain.load)


@each_kind
def test_meta_then_bfloat16_keeps_ties_and_float32_buffers(kind):
    family, flavor, sizes = KINDS[kind]
    with torch.device("meta"):
        overrides = {"dim": 32, "n_layers": 2, "vocab_size": 50, **sizes}
        model, args = build_model(family, flavor, seq_len=16, overrides=overrides)
    model.to_empty(device="cpu")
    initialize_weights(model, seed=0)
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} <= {torch.float32}
    if args.tie_embeddings:
        assert model.output.weight is model.tok_embeddings.weight
        assert model.num_parameters()["head"] == 0
    tokens, labels = batch()
    loss = model(tokens, labels=labels)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss.item() / (labels != -100).sum() - 3.9) < 2


@each_kind
def test_mixed_precision_is_near_float32(kind):
    model, plain = tiny(kind), tiny(kind)
    tokens, labels = batch()
    expected = plain(tokens, labels=labels)
    assert apply_mixed_precision(model, torch.bfloat16) > 0
    loss = model(tokens, labels=labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_tie_stays_one_parameter_that_reads_as_its_cast():
    """As the trainer builds a model: computing in another dtype first, then memory."""
    with torch.device("meta"):
        model, _ = build_model("gpt2", "debugmodel", seq_len=16, overrides={"vocab_size": 50})
    apply_mixed_precision(model, torch.bfloat16)
    model.to_empty(device="cpu")
    initialize_weights(model, seed=0)
    assert model.output._parameters["weight"] is model.tok_embeddings._parameters["weight"]
    assert model.output.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@each_kind
def test_text_is_sampled(kind):
    text = generate(tiny(kind), torch.tensor([[3, 1, 4]]), 16, temperature=0)
    assert text.shape == (1, 19)


def test_positions_are_learned_or_rotated():
    with pytest.raises(ValueError, match=r"seq_len \(or validation.seq_len\) = 2048.*1024 learned positions"):
        build_model("gpt2", "124M", seq_len=2048)
    with torch.device("meta"):
        model, args = build_model("gpt2", "124M", seq_len=512)
        longer, _ = build_model("gpt2", "124M", seq_len=2048, overrides={"n_positions": 2048})
    assert model.pos_embeddings.weight.shape == (1024, 768) and args.max_seq_len == 512
    assert longer.pos_embeddings.weight.shape == (2048, 768)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("qwen3", {"head_dim": 15}, "model.head_dim = 15"),
        ("qwen3", {"n_kv_heads": 3}, "model.n_kv_heads = 3"),
        ("qwen3_moe", {"n_experts_per_token": 7}, "n_experts_per_token = 7: must be from 1 to"),
        ("qwen3_moe", {"moe_balancing": "luck"}, "model.moe_balancing = 'luck'"),
        ("gpt2", {"n_heads": 5}, "not a multiple of model.n_heads = 5"),
        ("gpt2_modern", {"n_positions": 16}, "rotary positions"),
        ("gpt2", {"n_experts": 2}, "key of the gpt2 model = 'n_experts'"),
    ],
)
def test_sizes_that_cannot_be_built_are_named(kind, overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny(kind, **overrides)
