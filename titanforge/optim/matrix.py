"""Regime 2: A reads one coordinate, U reads the layer's state (LAMB, Muon, RMNP, Scion).

Dims -2 and -1 are the matrix [out, in]; leading dims are a batch (experts, or same-shape matrices stacked).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from titanforge.optim import in_place
from titanforge.optim.batches import Batch
from titanforge.optim.compiled import update_weight_in_place
from titanforge.optim.elementwise import bias_corrections, moment_hyperparameters, slots_of
from titanforge.optim.local_update import write_copies
from titanforge.optim.matrix_options import MatrixOptions
from titanforge.optim.newton_schulz import newton_schulz, orthogonalized_
from titanforge.optim.rule import State, StateGlobalRule, select


def layer_norm_of(x: Tensor) -> Tensor:
    """Frobenius norm of each layer, kept as dims of size 1: over the last two dims, or over a vector."""
    dims = (-2, -1) if x.dim() >= 2 else (-1,)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True)


class LAMB(StateGlobalRule):
    """Layer-wise scaled Adam (You et al. 2020, algorithm 2, phi the identity), the decay inside the ratio.

    r = m_hat / (sqrt(v_hat) + eps) + wd w; w <- w - lr |w| / |r| r, the ratio 1 where a norm is 0.
    """

    name = "lamb"
    option_names = ("beta1", "beta2", "eps")

    def __init__(self) -> None:
        self._use_kernel("lamb_state")
        self.slots = slots_of("lamb_state")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (*moment_hyperparameters(options), *bias_corrections(options, step))

    def weight_update(self, w: Tensor, state: State, h: Tensor, g: Tensor | None = None) -> Tensor:
        m, v = state
        direction = (m * h[9]) / (torch.sqrt(v) * h[10] + h[8]) + h[2] * w
        weight_norm, direction_norm = layer_norm_of(w), layer_norm_of(direction)
        both = (weight_norm > 0) & (direction_norm > 0)
        ratio = torch.where(both, weight_norm / direction_norm, 1.0)
        return select(h, w - (h[1] * ratio) * direction, w)

    def update_in_place(self, batch: Batch, h: Tensor) -> bool:
        if any(item.parts > 1 or item.codec is not None or not item.weight.is_cuda for item in batch):
            return False
        for item in batch:
            update_weight_in_place(self, item, h)
        write_copies(batch)
        return True


class MatrixRule(StateGlobalRule):
    """M <- mu M + gain G; W <- (1 - lr wd) W - lr s O(M), s and O of the whole matrix [m, n].

    O reads the momentum, and auxiliary states of the rule, and may write them. Nesterov: O is taken of
    G + mu M after the same accumulation.
    """

    a_affine = True
    matrix_only = True
    u_gathers = True
    option_names = ("momentum",)

    def __init__(self, options: MatrixOptions | None = None, nesterov: bool = False) -> None:
        self._use_kernel("momentum_state")
        self.slots = slots_of("momentum_state")
        self.u_reads_gradient = nesterov
        self.options = options or MatrixOptions()
        if self.options.update_scale == "rank_corrected" and self.name != "dion":
            raise ValueError(
                f'optimizer.update_scale = "rank_corrected" is for Dion, not for {self.name}: take "shared"'
            )

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["momentum"], 1.0)

    @abstractmethod
    def direction(self, m: Tensor, auxiliary: State, h: Tensor) -> tuple[Tensor, Tensor, State]:
        """O [*, m, n] of the momentum, with the momentum and the auxiliary states it leaves; out of place."""

    def own_scale(self, rows: int, columns: int) -> float:
        """s where `optimizer.update_scale = "own"`: Muon's, which RMNP has too."""
        return math.sqrt(max(1.0, rows / max(columns, 1)))

    def scale(self, rows: int, columns: int) -> float:
        """s of an m x n matrix (Dobb, equation 6, for the shared one)."""
        if self.options.update_scale == "own":
            return self.own_scale(rows, columns)
        return self.options.tau * math.sqrt(max(rows, columns))

    def scaled_direction(
        self,
        state: State,
        auxiliary: State,
        h: Tensor,
        g: Tensor | None = None,
        matrix: tuple[int, int] | None = None,
    ) -> tuple[Tensor, State, State]:
        """s O, and what it leaves in the states; where h[0] is 0 these are the old ones, bit for bit."""
        (m,) = state
        found = self.direction(self.looked_at(m, h, g), auxiliary, h)
        return self.applied(m, auxiliary, h, found, matrix)

    def applied(
        self,
        m: Tensor,
        auxiliary: State,
        h: Tensor,
        found: tuple[Tensor, Tensor, State],
        matrix: tuple[int, int] | None = None,
    ) -> tuple[Tensor, State, State]:
        """What `scaled_direction` returns, from what `direction` found."""
        update, left, new_auxiliary = found
        rows, columns = matrix or m.shape[-2:]
        kept = (select(h, left, m),) if self.u_writes_state else (m,)
        new_auxiliary = tuple(select(h, new, old) for new, old in zip(new_auxiliary, auxiliary))
        return update * self.scale(rows, columns), kept, new_auxiliary

    def looked_at(self, m: Tensor, h: Tensor, g: Tensor | None) -> Tensor:
        """What O is taken of: the momentum, or Nesterov's G + mu M."""
        if not self.u_reads_gradient:
            return m
        if g is None:
            raise ValueError(f"optimizer.nesterov = true: the update of {self.name} needs the gradient")
        return g * h[3] + h[4] * m

    def move(self, w: Tensor, update: Tensor, h: Tensor) -> Tensor:
        """W <- (1 - lr wd) W - lr (s O), on any part of the matrix."""
        return select(h, (w - (h[1] * h[2]) * w) - h[1] * update, w)

    def weight_update(self, w: Tensor, state: State, h: Tensor, g: Tensor | None = None) -> Tensor:
        return self.whole_update(w, state, (), h, g)[0]

    def whole_update(
        self,
        w: Tensor,
        state: State,
        auxiliary: State,
        h: Tensor,
        g: Tensor | None = None,
        matrix: tuple[int, int] | None = None,
    ) -> tuple[Tensor, State, State]:
        update, state, auxiliary = self.scaled_direction(state, auxiliary, h, g, matrix)
        return self.move(w, update, h), state, auxiliary


class OrthogonalRule(MatrixRule):
    """O = U V^T of M = U S V^T, by Newton-Schulz."""

    def direction(self, m: Tensor, auxiliary: State, h: Tensor) -> tuple[Tensor, Tensor, State]:
        muon = self.options.muon
        return newton_schulz(m, muon.steps, coefficients=muon.coefficients), m, ()

    @property
    def rounds_at_random(self) -> bool:
        return not self.u_reads_gradient

    def step_to_round(self, batch: Batch) -> tuple[Tensor, float]:
        muon, (rows, columns) = self.options.muon, batch[0].weight.shape[-2:]
        rows //= batch[0].parts
        stack = in_place.stacked(batch).view(-1, rows, columns)
        updates = orthogonalized_(stack, muon.steps, muon.coefficients).contiguous()
        return updates, self.scale(rows, columns)

    def update_in_place(self, batch: Batch, h: Tensor) -> bool:
        muon, shape, parts = self.options.muon, batch[0].weight.shape, batch[0].parts
        return in_place.orthogonal_update(
            batch,
            h,
            steps=muon.steps,
            coefficients=muon.coefficients,
            scale=self.scale(shape[-2] // parts, shape[-1]),
            nesterov=self.u_reads_gradient,
        )


class Muon(OrthogonalRule):
    """Orthogonalised momentum (Jordan et al. 2024).

    With the shared scale tau sqrt(max(m, n)), tau = 0.2, the update's root mean square matches AdamW's (Liu
    et al. 2025), so that one learning rate serves both rules of a run. Its own is sqrt(max(1, m / n)).
    """

    name = "muon"


class RMNP(MatrixRule):
    """Row-normalised momentum (Deng et al. 2026, as stated in the Dobb paper): each row of M to unit norm.

    A zero row stays zero. Its own scale is Muon's, sqrt(max(1, m / n)).
    """

    name = "rmnp"
    u_dims = (-1,)
    whole_parts = False

    def direction(self, m: Tensor, auxiliary: State, h: Tensor) -> tuple[Tensor, Tensor, State]:
        return unit_columns(m.mT).mT, m, ()

    def update_in_place(self, batch: Batch, h: Tensor) -> bool:
        if self.u_reads_gradient:
            return False
        rows, columns = batch[0].matrix or batch[0].weight.shape[-2:]
        return in_place.row_norm_update(batch, h, self.scale(rows, columns))


def unit_columns(x: Tensor) -> Tensor:
    """Columns of [*, m, n] scaled to unit norm; zero columns stay zero."""
    norm = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return torch.where(norm > 0, x / norm, 0.0)


class Scion(OrthogonalRule):
    """Steps on the spectral-norm ball (Pethick et al. 2025): M <- mu M + (1 - mu) G;
    W <- W - lr wd W - lr sqrt(out / in) O(M).

    The paper's constrained form W <- (1 - gamma) W - gamma rho ... is lr = gamma rho, weight_decay = 1 / rho;
    its unconstrained form is weight_decay = 0. `optimizer.update_scale` does not change its scale.
    """

    name = "scion"

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["momentum"], 1.0 - options["momentum"])

    def scale(self, rows: int, columns: int) -> float:
        return self.own_scale(rows, columns)

    def own_scale(self, rows: int, columns: int) -> float:
        return math.sqrt(rows / max(columns, 1))
