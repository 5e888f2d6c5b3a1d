"""Weight gradient and update in one kernel: the gradient exists in registers only.

`fused_wgrad_update` runs an update rule on each tile of G = dyᵀ x as the tile is finished; `wgrad_accumulate`
folds G into a state of an affine rule; `wgrad` stores G in fp32, from the same mainloop, so that the unfused
path (`wgrad`, then `flat_update`) is bit for bit the fused one. All take grouped weights (experts) as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, LAUNCH_OPTIONS, cdiv, runs_triton
from titanforge.kernels.codecs import CODECS, Encoded
from titanforge.kernels.config import TileConfig, choose_config
from titanforge.kernels.epilogues import Epilogue, get_epilogue
from titanforge.kernels.forms import AUTO, COOPERATIVE, PINGPONG, PORTABLE, explain, say_once, selected_form
from titanforge.kernels.gluon.launch import launch as gluon_launch
from titanforge.kernels.gluon.launch import refusal
from titanforge.kernels.step import Target, check_hyper, kernel_parts, make_target, reference_update
from titanforge.kernels.wgrad_kernel import wgrad_kernel


@dataclass(frozen=True)
class Operands:
    """dy [T, N] and x [T, K] (leading axes flattened, any strides), and offsets [E + 1] for grouped
    weights.
    """

    dy: Tensor
    x: Tensor
    offsets: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight gradient."""
        matrix = (self.dy.shape[1], self.x.shape[1])
        return matrix if self.offsets is None else (self.experts, *matrix)

    @property
    def experts(self) -> int:
        """Number of weights in the launch."""
        return 1 if self.offsets is None else self.offsets.shape[0] - 1


def _operands(dy: Tensor, x: Tensor, offsets: Tensor | None, expected: torch.Size | None = None) -> Operands:
    operands = Operands(dy.flatten(0, -2), x.flatten(0, -2), offsets)
    if operands.dy.shape[0] != operands.x.shape[0]:
        raise ValueError(f"dy has {operands.dy.shape[0]} tokens and x has {operands.x.shape[0]}")
    for name, tensor in (("dy", dy), ("x", x)):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} must be float32, bfloat16 or float16, not {tensor.dtype}")
    if offsets is not None and offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert offsets must be int32 or int64, not {offsets.dtype}")
    if expected is not None and operands.shape != tuple(expected):
        raise ValueError(f"the gradient of dy and x has shape {operands.shape}, the weight {tuple(expected)}")
    return operands


def config_for(
    dy: Tensor,
    x: Tensor,
    target: Target | None = None,
    experts: int = 1,
    *,
    observe: bool = False,
    bias: bool = False,
) -> TileConfig:
    """The tile configuration that a launch on these operands (and this target) chooses by itself.

    dy [T, N], x [T, K]. Its form is the one that `forge.kernel` asks for where that form takes the launch,
    and else the portable one.
    """
    tokens = cdiv(dy.shape[0], experts)
    dtype = dy.dtype if dy.dtype == x.dtype else torch.float32
    if target is None:
        return choose_config(dy.shape[1], x.shape[1], tokens, dtype, "gradient", dy.device, form=PORTABLE)
    names = "-".join(target.codec_names)

    def chosen(form: str | None = None) -> TileConfig:
        return choose_config(
            dy.shape[1], x.shape[1], tokens, dtype, names, dy.device, heavy=target.heavy, form=form
        )

    config = chosen()
    if config.form == PORTABLE:
        return config
    reason = refusal(dy, x, target, config, observe=observe, bias=bias)
    if not reason:
        return config
    if selected_form() == config.form:  # asked for by name
        say_once(f"forge.kernel = {config.form!r}: some launches run in the portable form ({reason})")
    elif config.form == COOPERATIVE:
        narrow = chosen(PINGPONG)
        if not refusal(dy, x, target, narrow, observe=observe, bias=bias):
            return narrow
    # What is so for one step, or for a vector, which is small, needs no word.
    if selected_form() == AUTO and tokens and not observe and dy.shape[1] > 1:
        say_once(f"some fused updates run in the portable, slower form of their kernel: {reason}")
    return chosen(PORTABLE)


def tile_count(shape: Sequence[int], config: TileConfig) -> int:
    """Number of tiles of a weight [N, K] or [E, N, K]: the length of its `norm_partials`."""
    n, k = shape[-2:]
    return cdiv(n, config.block_n) * cdiv(k, config.block_k) * (shape[0] if len(shape) == 3 else 1)


def fused_wgrad_update(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | Encoded | None,
    states: Sequence[Tensor | Encoded],
    epilogue: Epilogue | str,
    hyper: Tensor,
    *,
    master: Tensor | None = None,
    offsets: Tensor | None = None,
    rng: Tensor | None = None,
    tensor_id: int = 0,
    norm_partials: Tensor | None = None,
    nonfinite: Tensor | None = None,
    bias_gradient: Tensor | None = None,
    config: TileConfig | None = None,
    observe: bool = False,
) -> None:
    """Update weight and states in place by the gradient G = dyᵀ x, which is never stored.

    dy: [..., N] and x: [..., K] of the same leading shape, bf16, fp16 or fp32, any strides. weight: [N, K],
    states alike; or [E, N, K] with offsets [E + 1] (int), where tokens offsets[e] up to offsets[e + 1] belong
    to expert e, and an expert without tokens gets its update with a zero gradient. With no tokens at all the
    same holds. hyper: fp32 vector of the epilogue, h[0] = 0 leaves everything as it is, bit for bit.
    rng: int64 (seed, step), for codecs that round stochastically; equal (rng, tensor_id) replay equal bits.
    norm_partials: fp32 [tile_count(...)], receives the sum of squares of each tile of G, before h[3].
    nonfinite: int32 [1], counts tiles that were not applied because G was not finite there.
    bias_gradient: fp32 [N] or [E, N], receives the sum of dy over tokens.
    observe: store nothing; only collect the magnitudes that choose the first scales of fp8 tensors.

    Raises ValueError for shapes, dtypes or layouts that do not fit.
    """
    epilogue = get_epilogue(epilogue) if isinstance(epilogue, str) else epilogue
    target = make_target(epilogue, weight, states, master=master, tensor_id=tensor_id)
    operands = _operands(dy, x, offsets, target.shape)
    check_hyper(epilogue, hyper, rng, target.stochastic)
    parts = dict(zip(("s0", "s1"), target.states))
    _update_op(
        operands.dy, operands.x, offsets,
        None if target.weight is None else target.weight.values,
        None if target.weight is None else target.weight.meta,
        target.master,
        *(field for name in ("s0", "s1") for field in _fields(parts.get(name))),
        hyper, rng, norm_partials, nonfinite, bias_gradient, tensor_id, epilogue.name,
        ",".join(target.codec_names),
        _packed(config), observe,
    )  # fmt: skip


def _packed(config: TileConfig | None) -> list[int]:
    """A configuration as a custom op takes it. It is chosen inside the op, out of the compiler's sight, if
    None.
    """
    return config.packed() if config is not None else []


def _config(packed: list[int], operands: Operands, target: Target | None) -> TileConfig:
    if packed:
        config = TileConfig.unpacked(packed)
        # Only the portable form stores a gradient; all forms sum it in one order.
        return config_for(operands.dy, operands.x) if target is None and config.form != PORTABLE else config
    return config_for(operands.dy, operands.x, target, operands.experts)


def _fields(part: Encoded | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if part is None else (part.values, part.meta)


def wgrad_accumulate(
    dy: Tensor,
    x: Tensor,
    state: Tensor | Encoded,
    hyper: Tensor,
    *,
    offsets: Tensor | None = None,
    rng: Tensor | None = None,
    tensor_id: int = 0,
    norm_partials: Tensor | None = None,
    nonfinite: Tensor | None = None,
    config: TileConfig | None = None,
) -> None:
    """M <- decay M + gain G, in place: the state update of affine rules, once per micro-batch.

    hyper: (apply, 0, 0, grad_scale, decay, gain). The first micro-batch of a step passes the rule's decay and
    the later ones 1, so that no gradient buffer is needed. Other arguments as `fused_wgrad_update`.
    """
    fused_wgrad_update(
        dy, x, None, [state], "momentum_state", hyper, offsets=offsets, rng=rng, tensor_id=tensor_id,
        norm_partials=norm_partials, nonfinite=nonfinite, config=config,
    )  # fmt: skip


def wgrad(
    dy: Tensor, x: Tensor, *, offsets: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """G = dyᵀ x in fp32, [N, K] or [E, N, K], summed in the order of the fused kernel of the same
    `config`.
    """
    operands = _operands(dy, x, offsets)
    return _gradient_op(operands.dy, operands.x, offsets, _packed(config))


def wgrad_reference(dy: Tensor, x: Tensor, offsets: Tensor | None = None) -> Tensor:
    """G = dyᵀ x in plain torch, fp32."""
    dy, x = dy.to(torch.float32), x.to(torch.float32)
    if offsets is None:
        return dy.t() @ x
    bounds = offsets.tolist()
    return torch.stack([dy[a:b].t() @ x[a:b] for a, b in itertools.pairwise(bounds)])


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _launch(
    operands: Operands,
    config: TileConfig,
    parts: Sequence[Tensor | None],
    *,
    gradient: Tensor | None = None,
    epilogue: Epilogue | None = None,
    codecs: Sequence[int] = (0, 0, 0),
    stochastic: bool = False,
    hyper: Tensor | None = None,
    rng: Tensor | None = None,
    tensor_id: int = 0,
    norm: Tensor | None = None,
    nonfinite: Tensor | None = None,
    bias_gradient: Tensor | None = None,
    observe: bool = False,
) -> None:
    dy, x, shape = operands.dy, operands.x, operands.shape
    (tokens, n), k = dy.shape, x.shape[1]
    if n * k == 0:
        return
    mask_n, mask_k = n % config.block_n != 0, k % config.block_k != 0
    weight, _, master = parts[:3]
    mixed = dy.dtype != x.dtype
    wgrad_kernel[(tile_count(shape, config),)](
        dy, x, operands.offsets, gradient, bias_gradient, norm, nonfinite, *parts, hyper, rng, tensor_id,
        n, k, tokens, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1),
        EPILOGUE=epilogue.jit if epilogue is not None else None,
        SLOTS=len(epilogue.slots) if epilogue is not None else 0,
        WEIGHT=weight is not None, MASTER=master is not None,
        W_CODEC=codecs[0], S0_CODEC=codecs[1], S1_CODEC=codecs[2], STOCHASTIC=stochastic,
        STORE_GRADIENT=gradient is not None, GROUPED=operands.offsets is not None, BIAS=bias_gradient is not
        None,
        NORM=norm is not None, COUNT=nonfinite is not None, OBSERVE=observe,
        TO_FP32=mixed or (INTERPRET and not dy.is_cuda),
        PRECISION=_precision(torch.float32 if mixed else dy.dtype),
        MASK_T=tokens % config.block_t != 0 or operands.offsets is not None, MASK_N=mask_n, MASK_K=mask_k,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, BLOCK_T=config.block_t,
        GROUP=config.group, SPLIT=config.split,
        PREFETCH=config.prefetch and gradient is None and dy.is_cuda and not (mask_n or mask_k),
        num_warps=config.warps, num_stages=config.stages, **LAUNCH_OPTIONS,
    )  # fmt: skip


@torch.library.custom_op("titanforge::wgrad", mutates_args=())
def _gradient_op(dy: Tensor, x: Tensor, offsets: Tensor | None, config: list[int]) -> Tensor:
    if not runs_triton(dy):
        return wgrad_reference(dy, x, offsets)
    operands = Operands(dy, x, offsets)
    gradient = torch.empty(operands.shape, dtype=torch.float32, device=dy.device)
    _launch(operands, _config(config, operands, None), [None] * 7, gradient=gradient)
    return gradient


@_gradient_op.register_fake
def _(dy: Tensor, x: Tensor, offsets: Tensor | None, config: list[int]) -> Tensor:
    return dy.new_empty(Operands(dy, x, offsets).shape, dtype=torch.float32)


_MUTATED = (
    "weight", "weight_meta", "master", "s0", "s0_meta", "s1", "s1_meta", "norm_partials", "nonfinite",
    "bias_gradient",
)  # fmt: skip


@torch.library.custom_op("titanforge::wgrad_update", mutates_args=_MUTATED)
def _update_op(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor | None,
    weight: Tensor | None,
    weight_meta: Tensor | None,
    master: Tensor | None,
    s0: Tensor | None,
    s0_meta: Tensor | None,
    s1: Tensor | None,
    s1_meta: Tensor | None,
    hyper: Tensor,
    rng: Tensor | None,
    norm_partials: Tensor | None,
    nonfinite: Tensor | None,
    bias_gradient: Tensor | None,
    tensor_id: int,
    epilogue: str,
    codecs: str,
    config: list[int],
    observe: bool,
) -> None:
    rule = get_epilogue(epilogue)
    names = codecs.split(",")
    stored = [
        Encoded(values, CODECS[name], meta)
        for values, name, meta in zip((s0, s1), names[1:], (s0_meta, s1_meta))
        if values is not None
    ]
    stored_weight = Encoded(weight, CODECS[names[0]], weight_meta) if weight is not None else None
    operands = Operands(dy, x, offsets)
    target = Target(torch.Size(operands.shape), stored_weight, tuple(stored), master, tensor_id)
    update_target(
        operands, target, rule, hyper, rng=rng, norm_partials=norm_partials, nonfinite=nonfinite,
        bias_gradient=bias_gradient, config=_config(config, operands, target) if config else None,
        observe=observe,
    )  # fmt: skip


def update_target(
    operands: Operands,
    target: Target,
    rule: Epilogue,
    hyper: Tensor,
    *,
    rng: Tensor | None = None,
    norm_partials: Tensor | None = None,
    nonfinite: Tensor | None = None,
    bias_gradient: Tensor | None = None,
    config: TileConfig | None = None,
    observe: bool = False,
) -> None:
    """`fused_wgrad_update` without its checks, for callers that have made a `Target` once and use it at every
    step. No custom op: the compiler must not see it.
    """
    dy, x, offsets = operands.dy, operands.x, operands.offsets
    if runs_triton(dy):
        tiles = config or config_for(
            dy, x, target, operands.experts, observe=observe, bias=bias_gradient is not None
        )
        if norm_partials is not None and norm_partials.numel() < tile_count(operands.shape, tiles):
            raise ValueError(
                f"norm_partials holds {norm_partials.numel()} of {tile_count(operands.shape, tiles)} tiles"
            )
        if tiles.form != PORTABLE:
            if config is not None and (
                reason := refusal(dy, x, target, config, observe=observe, bias=bias_gradient is not None)
            ):
                raise ValueError(
                    f"the form {config.form} does not take this launch ({reason}): leave config out"
                )
            try:
                gluon_launch(
                    dy, x, target, rule, hyper, tiles, offsets=offsets, rng=rng, norm=norm_partials,
                    nonfinite=nonfinite,
                )  # fmt: skip
            except Exception as error:  # Triton's own types, which differ between its releases
                explain(tiles.form, error)
                raise
            return
        _launch(
            operands, tiles, kernel_parts(target), epilogue=rule,
            codecs=[CODECS[name].code for name in target.codec_names], stochastic=target.stochastic,
            hyper=hyper, rng=rng, tensor_id=target.tensor_id, norm=norm_partials, nonfinite=nonfinite,
            bias_gradient=bias_gradient, observe=observe,
        )  # fmt: skip
        return
    gradient = wgrad_reference(dy, x, offsets)
    if norm_partials is not None:
        norm_partials.zero_()
        norm_partials[0] = gradient.square().sum()
    if bias_gradient is not None:
        bias_gradient.copy_(_bias_gradient_reference(dy, offsets))
    reference_update(rule, gradient, target, hyper, rng, nonfinite, observe=observe)


def _bias_gradient_reference(dy: Tensor, offsets: Tensor | None) -> Tensor:
    dy = dy.to(torch.float32)
    if offsets is None:
        return dy.sum(0)
    bounds = offsets.tolist()
    return torch.stack([dy[a:b].sum(0) for a, b in itertools.pairwise(bounds)])


@_update_op.register_fake
def _(*_arguments: object) -> None:
    return None
