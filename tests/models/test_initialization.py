"""Initial weights: a function of seed, name and element alone, and of the right distribution."""

from __future__ import annotations

import math
import time
from statistics import NormalDist

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed_harness import run_distributed
from titanforge.models import initialization
from titanforge.models.generation import generate
from titanforge.models.initialization import initialize_weights, standard_normal
from titanforge.models.layers.init_spec import Constant, InitSpec, Normal
from titanforge.models.llama3 import Llama3
from titanforge.models.registry import build_model
from titanforge.parallelisms.data_parallel import apply_fsdp

KEYS = (12345, -678)
# float32 values as bits: -0.0338, 2.5288, -0.2779, -0.6497, 1.8337, 1.3121, and the draws cut at 3 x 0.02
GOLDEN_NORMAL = [-1123402252, 1075959732, -1097971929, -1088007476, 1072346524, 1067971082]
GOLDEN_CUT = [-1171228468, 1028198181, -1145725827, -1135330491, 1024776302, 1020651898]


class Holder(nn.Module):
    """One parameter, with the spec that a test wants."""

    def __init__(self, shape: tuple[int, ...], spec: InitSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.spec = spec

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": self.spec}


def drawn(*shape: int, spec: InitSpec | None = None, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    holder = Holder(shape, spec or Normal(1.0), dtype)
    initialize_weights(holder, seed)
    return holder.weight.detach()


def debug_model(**overrides) -> Llama3:
    overrides = {"vocab_size": 256, **overrides}
    with torch.device("meta"):
        model, _ = build_model("llama3", "debugmodel", seq_len=32, overrides=overrides)
    assert isinstance(model, Llama3)
    return model


def test_quantiles_are_the_normals():
    """The k-th smallest of n values is near the normal's k/n quantile: approximation and tail at once."""
    n = 2_000_000
    values = standard_normal(torch.arange(n), KEYS).sort().values
    exact = NormalDist().inv_cdf
    for level in (1e-5, 1e-4, 1e-3, 0.01, 0.07, 0.075, 0.08, 0.2, 0.4, 0.5, 0.6, 0.9, 0.93, 0.99, 0.9999):
        density = math.exp(-(exact(level) ** 2) / 2) / math.sqrt(2 * math.pi)
        deviation = math.sqrt(level * (1 - level) / n) / density  # of the sample quantile
        assert values[int(level * n)].item() == pytest.approx(exact(level), abs=5 * deviation)


def test_inverse_of_the_normal_distribution_is_accurate(monkeypatch):
    """Feed chosen levels p through the hash's place: the value is NormalDist's to 1e-6."""
    levels = [2.0**-36, 1e-9, 1e-6, 1e-3, 0.0749, 0.0751, 0.2, 0.49, 0.4999999]
    ticks = [math.floor(p * 2**36) for p in levels]  # p = (2 tick + 1) / 2^37
    words = [(t << 29) - (2**64 if t >> 34 else 0) for t in ticks]  # as signed integers
    bits = torch.tensor([[word, word + 1] for word in words]).view(-1)  # the lowest bit is the sign
    monkeypatch.setattr(initialization, "_hash", lambda index, keys: index)
    values = standard_normal(bits, KEYS).view(-1, 2)
    for tick, (positive, negative) in zip(ticks, values.tolist(), strict=True):
        exact = -NormalDist().inv_cdf((2 * tick + 1) / 2**37)
        assert positive == pytest.approx(exact, rel=1e-6)
        assert negative == -positive


def test_neighbours_and_streams_are_independent():
    n = 200_000
    first, second = drawn(n), drawn(n, seed=1)
    bound = 5 / math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack((first[:-1], first[1:])))[0, 1]) < bound
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < bound
    assert abs(torch.corrcoef(torch.stack((first.abs(), second.abs())))[0, 1]) < bound
    assert first.unique().numel() > 0.98 * n  # float32 has few values to spare near 1


@pytest.mark.parametrize(("spec", "bound"), [(Normal(0.02), 0.02 * 6.7), (Normal(0.5, cutoff=3.0), 1.5)])
def test_mean_deviation_and_bound(spec, bound):
    n = 1_000_000
    values = drawn(1000, 1000, spec=spec).double()
    kept = 1.0
    if spec.cutoff != math.inf:
        c = spec.cutoff  # variance of a truncated standard normal
        kept = 1 - 2 * c * math.exp(-c * c / 2) / math.sqrt(2 * math.pi) / math.erf(c / math.sqrt(2))
    deviation = spec.std * math.sqrt(kept)
    assert abs(values.mean()) < 5 * deviation / math.sqrt(n)
    assert values.std().item() == pytest.approx(deviation, rel=5 / math.sqrt(2 * n))
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.6 * bound


def test_values_are_these_on_every_machine():
    """Integer hashing and IEEE arithmetic: not a bit may differ between machines, devices or versions."""
    values = drawn(2, 3, spec=Normal(1.0), seed=7).view(torch.int32).flatten().tolist()
    cut = drawn(2, 3, spec=Normal(0.02, cutoff=3.0), seed=7).view(torch.int32).flatten().tolist()
    assert values == GOLDEN_NORMAL
    assert cut == GOLDEN_CUT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_what_the_cpu_draws():
    holder = Holder((1024, 2048), Normal(0.02, cutoff=3.0)).cuda()
    initialize_weights(holder, 0)
    assert torch.equal(holder.weight.cpu(), drawn(1024, 2048, spec=Normal(0.02, cutoff=3.0)))


def test_chunks_leave_no_trace(monkeypatch):
    whole = drawn(7, 11), drawn(40), drawn(3, 5, 4)
    for chunk in (1, 4, 11, 30):
        monkeypatch.setattr(initialization, "CPU_CHUNK", chunk)
        for a, b in zip(whole, (drawn(7, 11), drawn(40), drawn(3, 5, 4)), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(whole[2].flatten(), drawn(60))  # an element's counter is its flat index


def test_bfloat16_is_the_rounded_float32():
    assert torch.equal(drawn(33, 7, dtype=torch.bfloat16), drawn(33, 7).bfloat16())


def test_seed_and_name_make_the_stream():
    holders = nn.ModuleDict({name: Holder((64,), Normal(1.0)) for name in ("a", "b")})
    initialize_weights(holders, 0)
    a, b = (holders[name].weight.detach().clone() for name in ("a", "b"))
    assert (a != b).all()
    initialize_weights(holders, 1)
    assert (holders["a"].weight != a).all()
    initialize_weights(holders, 0)
    assert torch.equal(holders["a"].weight, a)
    assert torch.equal(holders["b"].weight, b)


def test_every_weight_of_the_model_is_what_it_should_be():
    model = debug_model().to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    initialize_weights(model, 0)
    depth = {"wo", "w2", "w3"}
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        if "norm" in name:
            assert (p == 1).all(), name
            continue
        std = 0.02
        if name == "tok_embeddings.weight":
            std = 1.0
        elif name == "output.weight":
            std = 256**-0.5 * 0.98658  # of a normal cut at 3
            assert p.abs().max() <= 3 * 256**-0.5
        elif name.split(".")[-2] in depth:
            std = 0.02 / math.sqrt(2 * (int(name.split(".")[1]) + 1))
        assert p.std().item() == pytest.approx(std, rel=0.02), name
    fresh, _ = build_model("llama3", "debugmodel", vocab_size=256, seq_len=32)
    for ours, theirs in zip(model.buffers(), fresh.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_tied_embedding_starts_as_a_head():
    model = debug_model(tie_embeddings=True).to_empty(device="cpu")
    initialize_weights(model, 0)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.std().item() == pytest.approx(256**-0.5 * 0.98658, rel=0.02)


def test_wrapped_blocks_draw_the_same():
    plain, wrapped = (debug_model(n_layers=2).to_empty(device="cpu") for _ in range(2))
    wrapped.layers["0"] = checkpoint_wrapper(wrapped.layers["0"])
    wrapped.layers["1"] = torch.compile(wrapped.layers["1"], backend="eager")
    initialize_weights(plain, 0)
    initialize_weights(wrapped, 0)
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_five_million_weights_are_quick():
    model = debug_model().to_empty(device="cpu")
    assert sum(p.numel() for p in model.parameters()) > 4.8e6
    best = math.inf
    for _ in range(3):
        start = time.thread_time()  # not the clock's: other work on the machine is no part of it
        initialize_weights(model, 0)
        best = min(best, time.thread_time() - start)
    assert best < 1.5


def test_undeclared_and_wrongly_declared_are_named():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with pytest.raises(ValueError, match=r"no module declares how to initialise 0\.weight"):
        initialize_weights(model, 0)

    class Wrong(Holder):
        def init_spec(self) -> dict[str, InitSpec]:
            return {"weights": Constant(0.0)}

    with pytest.raises(ValueError, match=r"Wrong\.init_spec: parameter weights does not exist"):
        initialize_weights(Wrong((2,), Normal(1.0)), 0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Holder((2,), Normal(1.0))

        def init_spec(self) -> dict[str, InitSpec]:
            return {"inner.weight": Constant(0.0)}

    with pytest.raises(ValueError, match=r"inner\.weight is declared twice"):
        initialize_weights(Twice(), 0)

    class Buffered(Holder):
        def __init__(self) -> None:
            super().__init__((2,), Normal(1.0))
            self.register_buffer("table", torch.zeros(1))

    with pytest.raises(ValueError, match="no module refills the buffer table"):
        initialize_weights(Buffered(), 0)
    with pytest.raises(ValueError, match="meta device"):
        initialize_weights(debug_model(), 0)


def _sharded(rank: int, world_size: int) -> None:
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases = [
        ((7, 5), line, [Shard(0)]),
        ((7, 5), line, [Shard(1)]),
        ((2, 5), line, [Shard(0)]),  # two ranks have nothing
        ((9,), line, [Shard(0)]),
        ((5, 7, 3), line, [Shard(1)]),
        ((6, 5), line, [Replicate()]),
        ((7, 9), grid, [Shard(0), Shard(1)]),
        ((7, 9), grid, [Replicate(), Shard(1)]),
        ((10, 3), grid, [Shard(0), Shard(0)]),
    ]
    for shape, mesh, placements in cases:
        check_sharded(shape, mesh, placements)


def check_sharded(shape, mesh, placements) -> None:
    spec = Normal(0.02, cutoff=3.0)
    holder = Holder(shape, spec)
    holder.weight = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
    initialize_weights(holder, 5)
    weight = holder.weight
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor()
    assert torch.equal(whole, drawn(*shape, spec=spec, seed=5)), (shape, placements)


def test_shards_draw_the_whole_tensors_values():
    run_distributed(_sharded, 4)


def _fully_sharded(rank: int, world_size: int) -> None:
    for tied in (False, True):
        check_fully_sharded(rank, world_size, tied)


def check_fully_sharded(rank: int, world_size: int, tied: bool) -> None:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 50, "vocab_size": 37}
    plain = debug_model(**sizes, tie_embeddings=tied).to_empty(device="cpu")
    initialize_weights(plain, 0)
    model = debug_model(**sizes, tie_embeddings=tied)
    apply_fsdp(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",)), None)
    model.to_empty(device="cpu")
    initialize_weights(model, 0)
    if tied:
        assert model.output.weight is model.tok_embeddings.weight
    for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(sharded, DTensor)
        assert torch.equal(sharded.full_tensor(), whole), name
    # The one training call gathers every weight, the head's included, and its gradients are sums over ranks.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 37, (world_size, 16), generator=generator)
    labels = torch.randint(0, 37, (world_size, 16), generator=generator)
    labels[0, 3:] = -100
    mine = slice(rank, rank + 1)
    loss = model(tokens[mine], None, None, labels[mine])
    loss.backward()
    expected = plain(tokens, None, None, labels)
    expected.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, expected.detach())
    for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, msg=name)
    text = generate(model, tokens[:1, :4], 6, temperature=0)
    assert torch.equal(text, generate(plain, tokens[:1, :4], 6, temperature=0))


def test_fully_sharded_model_starts_trains_and_generates_as_the_whole():
    run_distributed(_fully_sharded, 2)
