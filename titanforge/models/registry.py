"""The table of model families and their sizes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titanforge.models.decoder import Decoder
from titanforge.models.gpt2 import FLAVORS as GPT2_FLAVORS
from titanforge.models.gpt2 import GPT2
from titanforge.models.llama3 import FLAVORS as LLAMA3_FLAVORS
from titanforge.models.llama3 import Llama3
from titanforge.models.qwen3 import FLAVORS as QWEN3_FLAVORS
from titanforge.models.qwen3 import build_qwen3


@dataclass(frozen=True)
class ModelSpec:
    """A family: its sizes (dataclasses with ``vocab_size`` and ``max_seq_len``) and how to build one."""

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any], Decoder]


MODELS: dict[str, ModelSpec] = {
    "llama3": ModelSpec("llama3", LLAMA3_FLAVORS, Llama3),
    "qwen3": ModelSpec("qwen3", QWEN3_FLAVORS, build_qwen3),
    "gpt2": ModelSpec("gpt2", GPT2_FLAVORS, GPT2),
}


def build_model(
    name: str,
    flavor: str,
    *,
    vocab_size: int | None = None,
    seq_len: int,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Decoder, Any]:
    """Build a model and return it with its arguments. Under ``torch.device("meta")`` it takes no memory.

    vocab_size: the tokenizer's. It is the model's vocabulary where neither ``overrides`` nor the flavor gives
        one, and must fit into it where one does.
    seq_len: longest sequence the model will see.
    overrides: fields of the family's arguments; those that are None are passed over.

    Raises ValueError for an unknown family, flavor or field, and for sizes that do not fit together.
    """
    args = model_args(name, flavor, vocab_size=vocab_size, seq_len=seq_len, overrides=overrides)
    return MODELS[name].build(args), args


def model_args(
    name: str,
    flavor: str,
    *,
    vocab_size: int | None = None,
    seq_len: int,
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """The arguments of that model, as for ``build_model``; without a vocabulary if nothing gives one."""
    spec = MODELS[_known(name, MODELS, "model.name")]
    args = spec.flavors[_known(flavor, spec.flavors, "model.flavor")]
    changes = {key: value for key, value in (overrides or {}).items() if value is not None}
    for key in changes:
        _known(key, {field.name for field in dataclasses.fields(args)}, f"key of the {name} model")
    changes.setdefault("max_seq_len", seq_len)
    args = dataclasses.replace(args, **changes)
    if args.vocab_size is None:
        args = dataclasses.replace(args, vocab_size=vocab_size)
    elif vocab_size is not None and vocab_size > args.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, the model's vocabulary {args.vocab_size}: "
            f"set model.vocab_size to at least {vocab_size}"
        )
    return args


def _known(word: str, known: Mapping[str, Any] | set[str], what: str) -> str:
    if word in known:
        return word
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else ""
    raise ValueError(f"{what} = {word!r} is not one of {', '.join(sorted(known))}{hint}")
