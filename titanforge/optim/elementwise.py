"""Regime 1: rules whose A and U read one coordinate. Their arithmetic is in `kernels.references`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from titanforge.kernels.references import STATE_SLOTS
from titanforge.optim.rule import ElementwiseRule, State, StateSlot, select

_NONNEGATIVE_SLOTS = ("v", "u")


def slots_of(kernel_name: str) -> tuple[StateSlot, ...]:
    """The state slots of a kernel, each of the weight's shape."""
    return tuple(StateSlot(name, nonnegative=name in _NONNEGATIVE_SLOTS) for name in STATE_SLOTS[kernel_name])


def moment_hyperparameters(options: Mapping[str, float]) -> tuple[float, ...]:
    beta1, beta2 = options["beta1"], options["beta2"]
    return (beta1, 1.0 - beta1, beta2, 1.0 - beta2, options["eps"])


def bias_corrections(options: Mapping[str, float], step: int) -> tuple[float, float]:
    """1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)."""
    return 1.0 / (1.0 - options["beta1"] ** step), 1.0 / math.sqrt(1.0 - options["beta2"] ** step)


class _KernelRule(ElementwiseRule):
    """An elementwise rule with one kernel, named like the rule."""

    def __init__(self) -> None:
        self._use_kernel(self.name)
        self.slots = slots_of(self.name)


class SGD(ElementwiseRule):
    """Stochastic gradient descent, with heavy-ball or Nesterov momentum where `momentum` > 0.

    Decay in the gradient (L2), no dampening, as torch.optim.SGD. Without momentum there is no state, and
    A is trivially affine. With momentum A is affine too: it may accumulate over micro-batches in place.
    """

    name = "sgd"
    a_affine = True

    def __init__(self, use_momentum: bool = True, nesterov: bool = False) -> None:
        if nesterov and not use_momentum:
            raise ValueError("optimizer.nesterov = true needs optimizer.momentum > 0")
        kernel = ("sgd_nesterov" if nesterov else "sgd_momentum") if use_momentum else "sgd"
        self._use_kernel(kernel)
        self.slots = slots_of(kernel)
        # Stateless SGD has nothing that G could be folded into: U reads G itself.
        self.u_reads_gradient = nesterov or not use_momentum
        self.use_momentum = use_momentum

    option_names = ("momentum",)

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["momentum"],) if self.use_momentum else ()

    def weight_update(self, w: Tensor, state: State, h: Tensor) -> Tensor:
        """U alone, after A: w <- w - lr m. For heavy-ball momentum, whose A takes the decay with it."""
        return select(h, w - h[1] * state[0], w)


class Adagrad(_KernelRule):
    """Adaptive gradient (Duchi et al. 2011). Decay in the gradient (L2), as torch.optim.Adagrad."""

    name = "adagrad"
    u_reads_gradient = True
    option_names = ("eps",)

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["eps"],)


class RMSprop(_KernelRule):
    """RMSprop; its `alpha` is the option beta2. Decay in the gradient (L2), as torch.optim.RMSprop."""

    name = "rmsprop"
    u_reads_gradient = True
    option_names = ("beta2", "eps")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["beta2"], 1.0 - options["beta2"], options["eps"])


class Adam(_KernelRule):
    """Adam (Kingma and Ba 2015). Decay in the gradient (L2), as torch.optim.Adam."""

    name = "adam"
    option_names = ("beta1", "beta2", "eps")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (*moment_hyperparameters(options), *bias_corrections(options, step))


class AdamW(Adam):
    """Adam with decoupled decay (Loshchilov and Hutter 2019), as torch.optim.AdamW."""

    name = "adamw"


class Adamax(_KernelRule):
    """Adam with the infinity norm (Kingma and Ba 2015, section 7.1). Decay in the gradient, as torch's."""

    name = "adamax"
    option_names = ("beta1", "beta2", "eps")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        beta1, beta2 = options["beta1"], options["beta2"]
        return (beta1, 1.0 - beta1, beta2, options["eps"], bias_corrections(options, step)[0])


class NAdam(_KernelRule):
    """Adam with Nesterov momentum (Dozat 2016), decoupled decay: torch's with decoupled_weight_decay."""

    name = "nadam"
    u_reads_gradient = True
    option_names = ("beta1", "beta2", "eps")
    momentum_decay = 0.004
    """Dozat's schedule of beta1; torch's default."""

    def __init__(self) -> None:
        super().__init__()
        # Products of the momentum schedule per beta1, grown in order, so that a resumed run multiplies the
        # same numbers in the same order.
        self._products: dict[float, list[float]] = {}

    def _momentum(self, beta1: float, step: int) -> float:
        return beta1 * (1.0 - 0.5 * 0.96 ** (step * self.momentum_decay))

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        beta1 = options["beta1"]
        products = self._products.setdefault(beta1, [1.0])
        while len(products) <= step:
            products.append(products[-1] * self._momentum(beta1, len(products)))
        product, now, following = products[step], self._momentum(beta1, step), self._momentum(beta1, step + 1)
        return (
            *moment_hyperparameters(options),
            bias_corrections(options, step)[1],
            (1.0 - now) / (1.0 - product),
            following / (1.0 - product * following),
        )


class RAdam(_KernelRule):
    """Rectified Adam (Liu et al. 2020), decoupled decay: torch's with decoupled_weight_decay."""

    name = "radam"
    option_names = ("beta1", "beta2", "eps")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        beta2 = options["beta2"]
        correction2 = 1.0 - beta2**step
        rho_inf = 2.0 / (1.0 - beta2) - 1.0
        rho = rho_inf - 2.0 * step * beta2**step / correction2
        # Below a variance of 5 degrees of freedom the adaptive rate is intractable: plain momentum.
        adaptive = 0.0
        if rho > 5.0:
            numerator = (rho - 4.0) * (rho - 2.0) * rho_inf
            rectification = math.sqrt(numerator / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho))
            adaptive = rectification * math.sqrt(correction2)
        return (
            *moment_hyperparameters(options),
            bias_corrections(options, step)[0],
            adaptive,
            0.0 if rho > 5.0 else 1.0,
        )


class Lion(_KernelRule):
    """Sign of an interpolated momentum (Chen et al. 2023, algorithm 2), decoupled decay."""

    name = "lion"
    a_affine = True
    u_reads_gradient = True
    option_names = ("beta1", "beta2")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        beta1, beta2 = options["beta1"], options["beta2"]
        return (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
