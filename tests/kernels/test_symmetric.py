"""Symmetric products, Newton-Schulz and the write of many weights: Triton, interpreted, against float64."""

from __future__ import annotations

from tests.interpreted import needs_interpreter, run_interpreted

QUINTIC = (3.4445, -4.7750, 2.0315)


def check_all() -> None:
    """In a process of its own, where kernels are interpreted."""
    import torch

    from titanforge.kernels.apply_update import apply_updates, reference_apply_updates
    from titanforge.kernels.newton_schulz import newton_schulz_iterations, reference_iterations
    from titanforge.kernels.symmetric import symmetric_product
    from titanforge.kernels.symmetric_config import choose_symmetric

    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 20, 40), (2, 40, 20), (1, 33, 33)):  # wide, tall, ragged both ways
        x = torch.randn(shape, generator=generator)
        x = (x / x.norm(dim=(1, 2), keepdim=True)).bfloat16()
        tall, short = shape[1] > shape[2], min(shape[1:])
        config = choose_symmetric(short, max(shape[1:]), shape[0], x.device)
        assert config is not None  # the interpreter's
        gram = torch.empty(shape[0], short, short, dtype=torch.bfloat16)
        symmetric_product(x, gram, tall=tall, config=config)
        exact = x.double().mT @ x.double() if tall else x.double() @ x.double().mT
        # One rounding, which the interpreter does downwards.
        assert ((gram.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-6).all()
        assert torch.equal(gram, gram.mT)
        added = torch.empty_like(gram)
        symmetric_product(gram, added, alpha=2.0, add=gram, beta=-4.0, diagonal=3.0, config=config)
        g = gram.double()
        exact = 2 * g @ g - 4 * g + 3 * torch.eye(short)
        assert ((added.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-6).all()
        double = reference_iterations(x.double(), 5, QUINTIC)
        plain = reference_iterations(x.clone(), 5, QUINTIC)
        mine = newton_schulz_iterations(x.clone(), 5, QUINTIC)
        assert mine.dtype == torch.bfloat16 and mine.shape == x.shape
        assert (mine.double() - double).norm() <= 1.2 * (plain.double() - double).norm()

    for applies in (1.0, 0.0):
        hyper = torch.tensor([applies, 0.1, 0.2])
        masters = [torch.randn(5, 7, generator=generator) for _ in range(3)]
        copies = [w.bfloat16() for w in masters]
        before = [[t.clone() for t in tensors] for tensors in (masters, copies)]
        updates = torch.randn(3, 5, 7, generator=generator)
        apply_updates(masters, copies, updates, hyper, 0.3)
        expected = [[t.clone() for t in tensors] for tensors in before]
        reference_apply_updates(expected[0], expected[1], updates, hyper, 0.3)
        assert all(torch.equal(a, b) for a, b in zip(masters, expected[0]))
        for copy, wanted in zip(copies, expected[1]):
            torch.testing.assert_close(copy, wanted, rtol=2**-7, atol=0)
        if not applies:
            assert all(torch.equal(a, b) for a, b in zip(masters + copies, before[0] + before[1]))


@needs_interpreter
def test_interpreted_kernels_equal_float64() -> None:
    run_interpreted(check_all)
