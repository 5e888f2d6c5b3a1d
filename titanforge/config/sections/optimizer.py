"""Updates of weights: `[optimizer]` with its tables, `[lr_scheduler]`, `[forge]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ParamGroup:
    pattern: str = ""
    """Regular expression searched in the parameter's full name; the first group that matches wins."""
    lr: float | None = None
    """Peak learning rate of this group; default `optimizer.lr`."""
    weight_decay: float | None = None
    """Weight decay of this group; default `optimizer.weight_decay`."""
    beta1: float | None = None
    """First-moment decay of this group; default `optimizer.beta1`."""
    beta2: float | None = None
    """Second-moment decay of this group; default `optimizer.beta2`."""
    eps: float | None = None
    """Epsilon of this group; default `optimizer.eps`."""


@dataclass
class ScalarOptimizer:
    name: str = "AdamW"
    """Rule for the weights that a matrix rule does not take: embeddings, head, norms, biases."""
    lr: float | None = None
    """Peak learning rate; default `optimizer.lr`."""
    beta1: float = 0.9
    """First-moment decay."""
    beta2: float = 0.95
    """Second-moment decay."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Weight decay, in the way of the rule."""


@dataclass
class MuonOptions:
    steps: int = 5
    """Newton-Schulz iterations (Muon, Scion)."""
    coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.7750, 2.0315])
    """a, b, c of the iteration X <- a X + (b A + c A A) X, A = X X^T (Muon, Scion)."""


@dataclass
class DionOptions:
    rank_fraction: float = 1.0
    """rho: the rank is max(1, floor(rho min(m, n)))."""
    error_feedback: bool = True
    """M keeps what the low rank leaves out (Dion); false: M <- mu M + G (CurvaDion, section 2.1)."""


@dataclass
class DobbOptions:
    side: Literal["A", "G"] = "A"
    """Basis from input activations (A, Dobb) or from output gradients (G, Dobb-G)."""
    norm: Literal["linf", "l2"] = "linf"
    """Coefficients: their sign (linf), or columns of unit norm (l2)."""
    blocks: int = 1
    """B: blocks of the input axis (side A) or the output axis (G); must divide it. B = n: sign momentum."""
    block_width: int = 0
    """Width of a block instead of their number, the same for every weight; 0: `blocks` counts."""
    period: int = 9
    """T: steps from one capture and refresh to the next."""
    decay: float = 0.95
    """beta_C: decay of the second moments, per capture."""
    capture: Literal["first", "all"] = "first"
    """Micro-batches of a refresh step that are captured."""
    source: Literal["activation", "gradient"] = "activation"
    """What second moments are of: what layers read or, with side G, their output gradients; `gradient`: the
    weight's own gradient, G^T G or G G^T, at every step (an ablation of the paper: appendix F.3)."""
    iterations: int = 1
    """k: warm orthogonal iterations a refresh; 0: an exact eigendecomposition every time."""
    qr: Literal["householder", "cholesky"] = "cholesky"
    """How an iteration orthonormalises. The paper's principal runs use householder."""
    shift: float = 1e-6
    """eps: added to the diagonal at the cold start and before Householder QR."""
    relative_shift: float = 1e-2
    """omega: before Cholesky QR the shift is omega times the largest absolute row sum of C."""
    statistics_dtype: Literal["float32", "bfloat16"] = "float32"
    """How second moments are stored between refreshes (C)."""
    basis_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """How bases are stored (U)."""
    overlap_refresh: bool = True
    """Refresh bases during backward, on a stream of its own, once inputs are captured; false: in the
    optimizer call. The same bits either way. Side G and exact eigendecompositions wait for the call."""


@dataclass
class Optimizer:
    name: str = "AdamW"
    """Update rule, any case: see docs/optimizers.md for the list."""
    lr: float = 8e-4
    """gamma: peak learning rate."""
    beta1: float = 0.9
    """First-moment decay (Adam family, Lion)."""
    beta2: float = 0.95
    """Second-moment decay (Adam family, RMSprop); Lion's of its momentum."""
    eps: float = 1e-8
    """Added to the denominator (Adam family, Adagrad, RMSprop, LAMB, AdaLomo, SM3)."""
    weight_decay: float = 0.1
    """lambda: weight decay, decoupled or L2 as the rule has it (docs/optimizers.md); norms, biases and
    embeddings get none unless a group says so."""
    momentum: float = 0.9
    """mu: momentum of SGD, LARS and the matrix rules; the papers of these take 0.95."""
    nesterov: bool = False
    """Nesterov momentum (SGD, Muon, RMNP, Dobb)."""
    update_scale: Literal["shared", "own", "rank_corrected"] = "shared"
    """s, by which a matrix rule multiplies its update. `shared`: tau sqrt(max(m, n)) for all of them; `own`:
    each method's (docs/optimizers.md); `rank_corrected`: Dion's tau sqrt(m n / r)."""
    update_scale_tau: float = 0.2
    """tau of the shared scale: 0.2 matches the size of AdamW's updates, so that its learning rate serves."""
    per_head: bool = False
    """Matrix rules take each head of a query, key or value projection as a matrix of its own."""
    implementation: Literal["native", "fused", "foreach", "for-loop"] = "native"
    """`native`: titanforge's rules. The others: torch.optim's implementations (AdamW, Adam, SGD)."""
    state_dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """How optimizer states are stored (`native`)."""
    master_weights: Literal["none", "float32", "stochastic_rounding"] = "none"
    """How bfloat16 weights keep small updates; only with training.dtype = "bfloat16" (`native`)."""
    param_groups: list[ParamGroup] = field(default_factory=list)
    """Groups by name pattern (`[[optimizer.param_groups]]`); what none matches gets the defaults."""
    scalar: ScalarOptimizer = field(default_factory=ScalarOptimizer)
    """The rule beside a matrix rule."""
    muon: MuonOptions = field(default_factory=MuonOptions)
    """Muon and Scion."""
    dion: DionOptions = field(default_factory=DionOptions)
    """Dion."""
    dobb: DobbOptions = field(default_factory=DobbOptions)
    """Dobb."""


@dataclass
class LRScheduler:
    warmup_steps: int = 200
    """Steps of linear warm-up."""
    total_steps: int | None = None
    """Length of the schedule; default training.steps. Set it to stop early but keep the schedule."""
    decay_ratio: float | None = None
    """Share of the schedule that decays (warm-up, stable, decay); default: all after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Floor of the decay, as a share of the peak learning rate."""


@dataclass
class Forge:
    enable: bool = False
    """Run the optimizer where the weight gradient is made, so that no gradient is stored."""
    kernel: str = "auto"
    """Form of the fused weight-gradient kernel: `portable` runs on any GPU; `pp2` (up to 2048 tokens) and
    `coop` (more) on NVIDIA Hopper. `auto` chooses by shape and tokens, of the last two with Triton 3.6 and
    3.8 only: with 3.7 and 3.9 they compile but have not run on a GPU, and `auto` takes them once
    `python -m titanforge.kernels.check_forms` found them right on the card. All give the same bits. A launch
    that a form does not take (ragged shapes, experts in `coop`) runs in the portable one."""
    clip: Literal["exact", "lagged"] = "exact"
    """How fused weights honour `training.max_norm`. `exact` needs every gradient before any update, so a
    norm above 0 is refused; `lagged` takes the factor from the norms of the steps before."""
    accumulation: Literal["auto", "stash", "buffer"] = "auto"
    """How micro-batches are joined for rules that are not affine in the gradient."""
    keep_logits: bool = False
    """Keep a fused head's logits from forward to backward in place of forming them again: one matrix product
    of the head's four less, for tokens x vocabulary x 2 bytes (bf16) more at the peak (twice, of a head that
    shares its weight with the embedding). Without effect, which the plan then says, where the head's
    micro-batches are stashed or ranks share it."""
    merge_projections: bool = True
    """Multiply fused linears that share their input (q, k and v; gate and up) as one, their weights side by
    side in memory: fewer and larger products, and their input's gradient is summed in fp32 where the ordinary
    engine adds products in the model's dtype. On one device; the plan says how many groups there are."""
