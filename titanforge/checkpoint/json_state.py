"""State that is not a large tensor, as JSON: nothing of ours is ever pickled.

``split`` takes the tensors out of a nested state and leaves references; ``join`` puts tensors back.
``encode``/``decode`` carry Python values (and small tensors) through JSON unchanged.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_REFERENCE = "~tensor"  # a tensor stored by torch.distributed.checkpoint, by its name there
_INLINE = "~inline"  # a small tensor stored in the JSON itself
_TUPLE = "~tuple"
_PAIRS = "~pairs"  # a dict whose keys are not all text
_BYTES = "~bytes"
_TAGS = (_REFERENCE, _INLINE, _TUPLE, _PAIRS, _BYTES)


def split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON form of ``value`` with every tensor moved to ``tensors`` under a dotted name.

    Raises:
        TypeError: a value that JSON cannot carry; the message names its place.
        ValueError: two tensors would get the same name.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise ValueError(f"two tensors of the state are both called {name!r}")
        tensors[name] = value
        return {_REFERENCE: name}
    return _encode(value, name, lambda v, n: split(v, n, tensors))


def join(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of ``split``, without what other ranks hold: entries whose tensors are not in ``tensors``.

    Raises:
        KeyError: a tensor that is missing stands in a list, whose other items would move up.
    """
    if isinstance(encoded, dict):
        if _REFERENCE in encoded:
            return tensors[encoded[_REFERENCE]]
        encoded = {name: item for name, item in encoded.items() if not _is_elsewhere(item, tensors)}
    return _decode(encoded, lambda v: join(v, tensors))


def _is_elsewhere(encoded: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Whether all that this stands for are tensors of other ranks."""
    if not isinstance(encoded, dict) or not encoded:
        return False
    if _REFERENCE in encoded:
        return encoded[_REFERENCE] not in tensors
    return all(_is_elsewhere(item, tensors) for item in encoded.values())


def merge(ours: Any, theirs: Any, name: str = "state") -> Any:
    """One state out of the split states of two ranks, each of which may hold what the other has not.

    Raises:
        ValueError: both hold something, and not the same; the message names its place.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict) and not any(t in ours for t in _TAGS):
        return {
            key: theirs[key]
            if key not in ours
            else ours[key]
            if key not in theirs
            else merge(ours[key], theirs[key], f"{name}.{key}")
            for key in ours | theirs
        }
    if ours != theirs:
        raise ValueError(f"{name} of the state differs between ranks: {ours!r} and {theirs!r}")
    return ours


def encode(value: Any, name: str = "state") -> Any:
    """JSON form of a nested value; tensors are stored inline, bit for bit.

    Raises:
        TypeError: a value that JSON cannot carry; the message names its place.
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {
            _INLINE: base64.b64encode(flat.numpy().tobytes()).decode("ascii"),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
    return _encode(value, name, encode)


def decode(encoded: Any) -> Any:
    """Inverse of ``encode``.

    Raises:
        ValueError: an inline tensor of an unknown dtype.
    """
    if isinstance(encoded, dict) and _INLINE in encoded:
        dtype = getattr(torch, encoded["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {encoded['dtype']!r}")
        data = bytearray(base64.b64decode(encoded[_INLINE]))
        if not data:
            return torch.empty(encoded["shape"], dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(encoded["shape"]).clone()
    return _decode(encoded, decode)


def _encode(value: Any, name: str, inner) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, list):
        return [inner(item, f"{name}.{index}") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [inner(item, f"{name}.{index}") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not any(tag in value for tag in _TAGS):
            return {key: inner(item, f"{name}.{key}") for key, item in value.items()}
        return {_PAIRS: [[inner(k, name), inner(item, f"{name}.{k}")] for k, item in value.items()]}
    raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: use plain values.")


def _decode(encoded: Any, inner) -> Any:
    if isinstance(encoded, list):
        return [inner(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _BYTES in encoded:
        return base64.b64decode(encoded[_BYTES])
    if _TUPLE in encoded:
        return tuple(inner(item) for item in encoded[_TUPLE])
    if _PAIRS in encoded:
        return {inner(key): inner(item) for key, item in encoded[_PAIRS]}
    return {key: inner(item) for key, item in encoded.items()}
