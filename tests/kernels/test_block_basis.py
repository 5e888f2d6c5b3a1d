"""Dobb's step by kernels, interpreted: in one launch and in two, with the gradient in it and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interpreted import needs_interpreter, run_interpreted


def check_kernels() -> None:
    """In a process of its own, where kernels are interpreted: weights of 40 x 160, tiles ragged."""
    import torch

    from titanforge.kernels.block_basis import ONE_LAUNCH, WHOLE_BLOCK, SignUpdates, reference_sign_updates

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]

    for width, form in ((20, "narrow"), (40, "wide"), (80, "split")):
        assert form == ("narrow" if width <= WHOLE_BLOCK else "wide" if width <= ONE_LAUNCH else "split")
        for dtype, applies in ((torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.bfloat16, 0.0)):
            hyper = torch.tensor([applies, 0.1, 0.2, 0.5, 0.9, 1.0])
            bases = [torch.linalg.qr(x).Q.bfloat16().contiguous() for x in drawn(160 // width, width, width)]
            momenta, weights, gradients = drawn(40, 160, dtype=dtype), drawn(40, 160), drawn(40, 160)
            gradients[0][3, 7], gradients[1][33, 150] = torch.nan, -torch.inf
            copies = [weight.bfloat16() for weight in weights]
            wanted, copied = [weight.clone() for weight in weights], [copy.clone() for copy in copies]
            before = [momentum.clone() for momentum in momenta]
            nonfinite = torch.zeros(1, dtype=torch.int32)
            update = SignUpdates(momenta, bases, weights, copies)
            assert update.takes_gradients == (form != "split")
            if update.takes_gradients:
                for gradient, momentum in zip(gradients, before):  # the order of `momentum_state`
                    new = hyper[4] * momentum.float() + hyper[5] * (gradient * hyper[3])
                    good = torch.isfinite(gradient) & (hyper[0] != 0)
                    momentum.copy_(torch.where(good, new, momentum.float()))
                update(hyper, 0.3, gradients, nonfinite)
            else:
                update(hyper, 0.3)
            assert all(map(torch.equal, momenta, before))
            # A program of the wide form may have had both.
            met = {"narrow": (2,), "wide": (1, 2), "split": (0,)}[form] if applies else (0,)
            assert nonfinite.item() in met
            reference_sign_updates(before, bases, wanted, copied, hyper, 0.3)
            for mine, theirs in zip((*weights, *copies), (*wanted, *copied)):
                tolerance = 1e-5 if mine.dtype == torch.float32 else 2**-6 * theirs.abs().max()
                rows = ((mine.float() - theirs.float()).abs() > tolerance).any(dim=1)
                assert rows.sum() <= (dtype == torch.float32), (form, dtype)  # a sign may turn
            if not applies:
                assert all(map(torch.equal, (*weights, *copies), (*wanted, *copied)))


SHAPES = (24, 40), (24, 40), (16, 160), (8, 320)


def check_engine(device: str = "cpu", shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
    """A step in one launch leaves the bits of one whose momentum is brought up to date before.

    shapes: in four blocks each; those of the last are too wide for one launch.
    """
    import torch
    from torch import nn

    from titanforge.optim.dobb.rule import Dobb
    from titanforge.optim.engine import RuleOptimizer
    from titanforge.optim.matrix_options import DobbOptions, MatrixOptions
    from titanforge.optim.param_groups import ParamGroupSpec
    from titanforge.optim.states import Recipe

    def built(dtype: torch.dtype) -> RuleOptimizer:
        generator = torch.Generator().manual_seed(3)
        weights = {
            f"w{index}": nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
            for index, shape in enumerate(shapes)
        }
        rule = Dobb(MatrixOptions(dobb=DobbOptions(blocks=4)))
        options = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
        group = ParamGroupSpec("matrices", rule, options, list(weights), list(weights.values()))
        state = "bfloat16" if dtype == torch.bfloat16 else "float32"
        made = RuleOptimizer([group], Recipe(state_dtype=state))
        for entry in made._all_entries():
            basis = entry.auxiliary["basis"]
            basis.copy_(torch.linalg.qr(torch.randn(basis.shape, generator=generator)).Q)
        return made

    for dtype in (torch.float32, torch.bfloat16):
        together, apart = built(dtype), built(dtype)
        for step in range(2):
            for index, (mine, theirs) in enumerate(
                zip(together.groups[0].params, apart.groups[0].params, strict=True)
            ):
                generator = torch.Generator().manual_seed(10 * step + index)
                if (step, index) != (1, 1):  # a weight without a gradient, in a batch with one that has
                    mine.grad = torch.randn(mine.shape, generator=generator).to(device, dtype)
                    theirs.grad = mine.grad.clone()
                else:
                    mine.grad = theirs.grad = None
            flag = torch.ones((), device=device)
            together.step(flag)
            apart.accumulate_step(flag)
            apart.finish_step()
        for mine, theirs in zip(together._all_entries(), apart._all_entries(), strict=True):
            assert torch.equal(mine.param, theirs.param), mine.name
            assert torch.equal(mine.momentum, theirs.momentum), mine.name
        (family,) = together._families
        assert [tuple(item.weight.shape) for item in family.elementwise._items] == [shapes[-1]]


@needs_interpreter
@pytest.mark.parametrize("check", [check_kernels, check_engine])
def test_interpreted(check: Callable[[], None]) -> None:
    run_interpreted(check)
