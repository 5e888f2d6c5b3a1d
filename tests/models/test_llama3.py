"""The model against a plain reference, its sizes, its counts, and what may be done to it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from tests.models.reference import reference_hidden, reference_loss
from titanforge.models.initialization import initialize_weights
from titanforge.models.layers.attention import attend, build_attention_mask, document_block_mask
from titanforge.models.layers.rope import RopeScaling, rope_frequencies
from titanforge.models.llama3 import Llama3, Llama3Args
from titanforge.models.registry import build_model
from titanforge.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanforge.parallelisms.compile import apply_compile

TINY = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 50}


def tiny_model(**changes) -> Llama3:
    model, _ = build_model("llama3", "debugmodel", seq_len=16, overrides={**TINY, **changes})
    assert isinstance(model, Llama3)
    initialize_weights(model, seed=1)
    with torch.no_grad():  # norms of ones and a small head would hide mistakes
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.add_(0.2 * noise)
    return model


def batch(seed: int = 0, B: int = 2, T: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (B, T), generator=generator)
    labels = torch.randint(0, 50, (B, T), generator=generator)
    labels[:, ::5] = -100
    return tokens, labels


def reference(model: Llama3, tokens: torch.Tensor, labels: torch.Tensor):
    """Loss and gradients by name, in float64, every row of ``tokens`` a document."""
    weights = {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}
    args = model.args
    loss = torch.zeros((), dtype=torch.float64)
    for row, row_labels in zip(tokens, labels, strict=True):
        hidden = reference_hidden(
            weights,
            row,
            n_layers=args.n_layers,
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads,
            eps=args.norm_eps,
            theta=args.rope_theta,
        )
        head = weights["tok_embeddings.weight" if args.tie_embeddings else "output.weight"]
        loss = loss + reference_loss(hidden, head, row_labels)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_loss_and_all_gradients_equal_the_reference(tied, n_kv_heads):
    model = tiny_model(tie_embeddings=tied, n_kv_heads=n_kv_heads)
    tokens, labels = batch()
    loss = model(tokens, labels=labels)
    loss.backward()
    expected, gradients = reference(model, tokens, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert {name for name, _ in model.named_parameters()} == set(gradients)
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(
            parameter.grad.double(), gradients[name], rtol=1e-4, atol=2e-6 * scale, msg=name
        )


def test_bfloat16_model_is_near_the_reference_and_keeps_float32_tables():
    model = tiny_model().to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rope.cos.dtype == torch.float32
    torch.testing.assert_close(model.rope.cos, tiny_model().rope.cos, rtol=0, atol=0)
    tokens, labels = batch()
    loss = model(tokens, labels=labels)
    loss.backward()
    expected, gradients = reference(model, tokens, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=0)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.double() - gradients[name]).norm() / gradients[name].norm()
        assert error < 0.05, (name, error)


def test_autocast_runs_and_is_near_the_reference():
    model = tiny_model()
    tokens, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=labels)
    loss.backward()
    expected, gradients = reference(model, tokens, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad.double() - gradients[name]).norm() / gradients[name].norm() < 0.05, name


def test_packed_documents_equal_documents_run_alone():
    model = tiny_model()
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
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    # and the mask matters: without it the loss is another
    assert abs(model(tokens, positions, None, labels) - alone) > 0.01


def test_forms_of_forward_agree():
    model = tiny_model()
    tokens, labels = batch()
    hidden = model(tokens)
    assert hidden.shape == (2, 12, 32)
    torch.testing.assert_close(model.loss_sum(hidden, labels), model(tokens, labels=labels))
    torch.testing.assert_close(model.logits(hidden)[:, 7], model(tokens, logits_at=7))
    positions = torch.arange(12).expand(2, 12)
    torch.testing.assert_close(model(tokens, positions), hidden)
    torch.testing.assert_close(model(tokens, positions, torch.zeros_like(tokens)), hidden)


def test_pipeline_stages_compose_to_the_whole():
    whole, first, second = tiny_model(), tiny_model(), tiny_model()
    first.norm = first.output = None
    del first.layers["1"]
    second.tok_embeddings = None
    del second.layers["0"]
    tokens, labels = batch()
    positions = torch.arange(12).flip(0).expand(2, 12)
    expected = whole(tokens, positions, None, labels)
    torch.testing.assert_close(second(first(tokens, positions), positions, None, labels), expected)
    for stage in (first, second):
        initialize_weights(stage, seed=3)
    initialize_weights(whole, seed=3)
    torch.testing.assert_close(second(first(tokens), labels=labels), whole(tokens, labels=labels))
    with pytest.raises(RuntimeError, match="no output head"):
        first(tokens, labels=labels)


def test_heads_are_inferred_so_a_half_of_the_heads_runs_unchanged():
    model = tiny_model()
    attention = model.layers["0"].attention
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    rotation = model.rope(None, 12)
    expected = attention(x, rotation, None)
    wq, wk, wv, wo = (getattr(attention, n).weight.detach().clone() for n in ("wq", "wk", "wv", "wo"))
    halves = []
    for part in range(2):
        attention.wq.weight = nn.Parameter(wq.chunk(2, 0)[part])
        attention.wk.weight = nn.Parameter(wk.chunk(2, 0)[part])
        attention.wv.weight = nn.Parameter(wv.chunk(2, 0)[part])
        attention.wo.weight = nn.Parameter(wo.chunk(2, 1)[part])
        halves.append(attention(x, rotation, None))
    torch.testing.assert_close(halves[0] + halves[1], expected)


@pytest.mark.parametrize("T", [256, 384, 300, 129, 128, 60])
def test_block_mask_equals_the_boolean_mask(T):
    generator = torch.Generator().manual_seed(T)
    ids = (torch.rand(3, T, generator=generator) < 0.02).cumsum(1)
    ids[0] = 0  # one document: full blocks
    ids[1] = torch.arange(T) // 128  # documents that end with a block
    mask = document_block_mask(ids)

    def rule(b, h, q, k):
        return (q >= k) & (ids[b, q] == ids[b, k])

    made = create_block_mask(rule, 3, None, T, T, device="cpu")
    assert torch.equal(mask.to_dense(), made.to_dense()), "other blocks visited than there must be"
    torch.testing.assert_close(mask.full_kv_num_blocks, made.full_kv_num_blocks, check_dtype=False)
    q, k, v = (torch.randn(3, h, T, 16, generator=generator) for h in (4, 2, 2))
    dense = build_attention_mask(ids)
    assert isinstance(dense, torch.Tensor)
    ours = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(ours, attend(q, k, v, dense), rtol=1e-4, atol=1e-5)


def test_block_mask_covers_documents_in_any_order():
    ids = torch.randint(0, 3, (2, 384), generator=torch.Generator().manual_seed(0))
    ids[1] = torch.arange(384).flip(0) // 128
    mask = document_block_mask(ids)
    dense = build_attention_mask(ids)
    assert isinstance(dense, torch.Tensor)
    needed = dense[:, 0].view(2, 3, 128, 3, 128).any(4).any(2)
    visited = mask.to_dense()[:, 0].bool()
    assert (visited >= needed).all()


def test_rope_scaling_of_llama_3_1():
    plain = rope_frequencies(128, 500_000.0, None)
    scaled = rope_frequencies(128, 500_000.0, RopeScaling(factor=8.0))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192 / 1:
            assert after == pytest.approx(before / 8, rel=1e-12)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-12)
    assert (scaled != plain).any() and (scaled == plain).any()


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_published_parameter_counts(flavor, parameters):
    with torch.device("meta"):
        model, args = build_model("llama3", flavor, seq_len=8192)
    assert isinstance(model, Llama3)
    assert sum(model.num_parameters().values()) == parameters
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {p.device.type for p in model.parameters()} | {b.device.type for b in model.buffers()} == {"meta"}
    assert (args.vocab_size, args.rope_theta, args.rope_scaling.original_context) == (128256, 500_000.0, 8192)
    assert args.rope_scaling.factor == (32 if args.tie_embeddings else 8)


def test_parameter_groups_add_up():
    model = tiny_model()
    assert model.num_parameters() == {
        "embedding": 50 * 32,
        "attention": 2 * (2 * 32 * 32 + 2 * 32 * 16),
        "feed_forward": 2 * 3 * 32 * 48,
        "norms": 5 * 32,
        "head": 50 * 32,
    }
    assert sum(model.num_parameters().values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_flops_equal_the_counted_ones(tied):
    model = tiny_model(tie_embeddings=tied)
    B, T = 2, 16
    tokens, labels = batch(B=B, T=T)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=labels).backward()
    # The plain kernel works out all T² pairs, of which T (T + 1) / 2 are causal: 12 per pair and channel.
    acausal = 12 * B * TINY["n_layers"] * TINY["dim"] * (T * T - T * (T + 1) / 2)
    assert counter.get_total_flops() == model.flops_per_token(T) * B * T + acausal


def test_flops_of_8b_are_those_worked_out_by_hand():
    with torch.device("meta"):
        model, _ = build_model("llama3", "8B", seq_len=8192)
    assert isinstance(model, Llama3)
    matrices = 8_030_261_248 - 525_336_576 - 266_240  # without the embedding and the norms
    assert model.flops_per_token(8192) == 6 * matrices + 6 * 32 * 4096 * 8193


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_compile_whole_and_recompute(documents, recompute):
    torch._dynamo.reset()
    model, plain = tiny_model(), tiny_model()
    tokens, labels = batch()
    ids = torch.arange(12).expand(2, 12) // 5 if documents else None
    apply_activation_checkpoint(model, recompute)
    apply_compile(model, "aot_eager")
    loss = model(tokens, None, ids, labels)
    loss.backward()
    expected = plain(tokens, None, ids, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_whole_model_with_its_loss_compiles_without_a_break():
    model, plain = tiny_model(), tiny_model()
    model.output.chunk_logits = plain.output.chunk_logits = 50 * 7  # several chunks
    tokens, labels = batch()
    model.compile(backend="aot_eager", fullgraph=True)
    loss, expected = model(tokens, labels=labels), plain(tokens, labels=labels)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_tied_weight_stays_one_parameter_through_meta_and_dtype():
    with torch.device("meta"):
        model, _ = build_model("llama3", "debugmodel", seq_len=16, overrides={**TINY, "tie_embeddings": True})
    assert isinstance(model, Llama3)
    model.to_empty(device="cpu")
    initialize_weights(model, seed=0)
    model.to(torch.bfloat16)
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" in dict(model.named_parameters(remove_duplicate=False))
    assert model.num_parameters()["head"] == 0


def test_state_dict_has_the_known_names_and_no_tables():
    names = set(tiny_model(n_layers=1).state_dict())
    block = ["attention_norm", "ffn_norm"]
    block += [f"attention.{w}" for w in ("wq", "wk", "wv", "wo")] + [f"feed_forward.w{i}" for i in (1, 2, 3)]
    expected = {f"layers.0.{name}.weight" for name in block}
    assert names == expected | {"tok_embeddings.weight", "norm.weight", "output.weight"}


def test_sequence_longer_than_the_tables_is_refused():
    with pytest.raises(ValueError, match="17 tokens; the model was built for 16"):
        tiny_model()(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dim": 33}, "model.dim = 33 is not a multiple of model.n_heads = 4"),
        ({"n_kv_heads": 3}, "model.n_kv_heads = 3"),
        ({"dim": 12}, "rotary embedding"),
        ({"n_layers": 0}, "model.n_layers = 0"),
        ({"n_layer": 2}, "did you mean 'n_layers'"),
    ],
)
def test_sizes_that_cannot_be_built_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        build_model("llama3", "debugmodel", seq_len=8, overrides={**TINY, **overrides})


def test_registry_names_what_it_has():
    with pytest.raises(ValueError, match=r"llama3.*did you mean 'llama3'"):
        build_model("lama3", "8B", seq_len=8)
    with pytest.raises(ValueError, match=r"model.flavor = '8b'.*405B.*did you mean '8B'"):
        build_model("llama3", "8b", seq_len=8)
    with pytest.raises(ValueError, match="vocab_size"):
        build_model("llama3", "debugmodel", seq_len=8)


def test_vocabulary_comes_from_override_then_flavor_then_tokenizer():
    with torch.device("meta"):
        _, from_tokenizer = build_model("llama3", "debugmodel", seq_len=8, vocab_size=257)
        _, from_flavor = build_model("llama3", "1B", seq_len=8, vocab_size=257)
        _, override = build_model("llama3", "1B", seq_len=8, vocab_size=257, overrides={"vocab_size": 512})
        with pytest.raises(ValueError, match="tokenizer has 257 tokens, the model's vocabulary 256"):
            build_model("llama3", "1B", seq_len=8, vocab_size=257, overrides={"vocab_size": 256})
    assert [a.vocab_size for a in (from_tokenizer, from_flavor, override)] == [257, 128256, 512]
    assert from_tokenizer.max_seq_len == 8


def test_overrides_leave_the_table_alone_and_none_means_unset():
    with torch.device("meta"):
        _, args = build_model(
            "llama3", "debugmodel", vocab_size=9, seq_len=8, overrides={"dim": 128, "n_heads": None}
        )
        _, again = build_model("llama3", "debugmodel", vocab_size=9, seq_len=8)
    assert (args.dim, args.n_heads, again.dim) == (128, 8, 256)
    assert Llama3Args(dim=4096, n_layers=1, n_heads=8, n_kv_heads=8).ffn_dim == 11008  # Llama's own default
