"""What the compiler is told beside the code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from titanforge.forge import ops
from titanforge.parallelisms import compile as compilation


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [None, 0.99])
def test_inductor_pads_no_rows(budget: float | None, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows that an operator of ours reads too were laid in one way and multiplied in another."""
    told: list[dict[str, Any]] = []

    def compiled(graph: Any, inputs: Any, **options: Any) -> Any:
        told.append(options["config_patches"])
        return graph

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _name: compiled)
    compilation._instructed.__wrapped__("inductor", budget, overlap)(
        torch.fx.GraphModule({}, torch.fx.Graph()), []
    )
    assert isinstance(told[0].pop("custom_partitioner_fn", None), CustomPartitionerFn) == (budget is not None)
    assert told == [{"comprehensive_padding": False} | ({"_micro_pipeline_tp": True} if overlap else {})]
    assert told[0].keys() <= torch._inductor.config.get_config_copy().keys()  # pyright: ignore[reportAttributeAccessIssue]


def test_ops_of_backward_take_any_layout() -> None:
    """Else the compiler lays their operands out anew, in torch 2.11 wrongly (see `ops._define`)."""
    found = [ops.consume_product, ops.consume_rows, ops.consume_gradient, ops.consume_experts]
    assert all(torch.Tag.flexible_layout in op.default.tags for op in found)
