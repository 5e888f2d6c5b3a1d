"""What the rules of matrices are told beside the numbers of a group: plain values, one class per rule."""

from __future__ import annotations

from dataclasses import dataclass, field

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz coefficients of Jordan et al. (2024), "Muon": the steepest slope at zero, so that five
steps bring every singular value above about 1e-3 of the largest into [0.7, 1.2]."""


@dataclass(frozen=True)
class MuonOptions:
    """`[optimizer.muon]`. steps: iterations. coefficients: a, b, c of `newton_schulz`."""

    steps: int = 5
    coefficients: tuple[float, float, float] = QUINTIC


@dataclass(frozen=True)
class DionOptions:
    """`[optimizer.dion]`. rank_fraction: rho. error_feedback: Dion; False: CurvaDion, section 2.1."""

    rank_fraction: float = 1.0
    error_feedback: bool = True


@dataclass(frozen=True)
class DobbOptions:
    """`[optimizer.dobb]`, in the symbols of the paper (algorithms 1 to 4).

    side: A or G. norm: linf or l2. blocks: B; block_width: n / B instead, where not 0. period: T. decay:
    beta_C. qr: householder or cholesky. iterations: k; 0: an exact eigendecomposition at every refresh.
    shift: eps of the cold start and of Householder. relative_shift: omega of Cholesky. statistics_dtype,
    basis_dtype: float32 or bfloat16. capture: first or all micro-batches of a refresh step. overlap_refresh:
    refresh beside backward. source: of the second moments: activations (or output gradients, by side), or
    gradient: the Gram matrices of the weight's gradient (appendix F.3), which enter at every step.
    """

    side: str = "A"
    norm: str = "linf"
    blocks: int = 1
    block_width: int = 0
    period: int = 9
    decay: float = 0.95
    qr: str = "cholesky"
    iterations: int = 1
    shift: float = 1e-6
    relative_shift: float = 1e-2
    statistics_dtype: str = "float32"
    basis_dtype: str = "bfloat16"
    capture: str = "first"
    overlap_refresh: bool = True
    source: str = "activation"


@dataclass(frozen=True)
class MatrixOptions:
    """update_scale: s = tau sqrt(max(m, n)) (`shared`), each method's `own`, or Dion's `rank_corrected`."""

    update_scale: str = "shared"
    tau: float = 0.2
    muon: MuonOptions = field(default_factory=MuonOptions)
    dion: DionOptions = field(default_factory=DionOptions)
    dobb: DobbOptions = field(default_factory=DobbOptions)
