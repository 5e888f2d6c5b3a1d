"""Values survive JSON unchanged."""

from __future__ import annotations

import json
import math

import pytest
import torch

from titanforge.checkpoint import json_state

VALUES = [
    None,
    True,
    -(2**70),
    0.1,
    [1, [2]],
    (1, (2, "x")),
    b"\x00\xff",
    {"a": {"b": 1}},
    {1: "one", (2, 3): [4]},
    {"~tuple": "a key of ours", "x": 1},
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values(value):
    through = json_state.decode(json.loads(json.dumps(json_state.encode(value))))
    assert through == value and type(through) is type(value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_tensors_inline(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    through = json_state.decode(json.loads(json.dumps(json_state.encode({"t": [tensor]}))))["t"][0]
    assert through.dtype == dtype and torch.equal(through, tensor)


def test_nonfinite_numbers():
    infinity, nan = json_state.decode(json.loads(json.dumps(json_state.encode([math.inf, math.nan]))))
    assert infinity == math.inf and math.isnan(nan)


def test_split_and_join():
    weight, moment = torch.ones(2), torch.zeros(2)
    tensors: dict[str, torch.Tensor] = {}
    state = {"w": weight, "slots": [moment, 3], "groups": ({"lr": 0.1},)}
    encoded = json_state.split(state, "optimizer", tensors)
    assert tensors == {"optimizer.w": weight, "optimizer.slots.0": moment}
    joined = json_state.join(json.loads(json.dumps(encoded)), tensors)
    assert joined == {"w": weight, "slots": [moment, 3], "groups": ({"lr": 0.1},)}


def test_what_json_cannot_carry_is_named_by_place():
    with pytest.raises(TypeError, match=r"train_state\.a\.0 is a set"):
        json_state.encode({"a": [{1}]}, "train_state")
    with pytest.raises(ValueError, match=r"model\.a\.b"):
        json_state.split({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "model", {})
    with pytest.raises(ValueError, match="unknown dtype"):
        json_state.decode({"~inline": "", "dtype": "load", "shape": [0]})
