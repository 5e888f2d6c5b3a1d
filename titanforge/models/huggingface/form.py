"""What a family needs so that its weights can be exchanged with Hugging Face's tools. Names and numbers only.

Files are read and written in ``titanforge.checkpoint.huggingface``, which is handed one of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from titanforge.models.layers.rope import RopeScaling

# Keys of a config.json that change nothing about the function that the weights compute.
HARMLESS = {
    *("_name_or_path", "architectures", "model_type", "transformers_version", "task_specific_params"),
    *("torch_dtype", "dtype", "initializer_range", "use_cache", "gradient_checkpointing", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "n_ctx", "max_window_layers"),
    *("output_router_logits", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj"),
    # Dropout acts in training alone, and pretraining goes without.
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
}


@dataclass(frozen=True)
class Source:
    """Where one of our tensors lives in Hugging Face's files.

    names: one tensor; or one for each index of our first axis, which they stack up to.
    transposed: each is stored as [in, out], where ours is [out, in].
    """

    names: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False


class HuggingFaceForm(ABC):
    """One model as Hugging Face's tools see it.

    Attributes:
        family: its name in ``registry.MODELS``.
        model_type, architecture: what config.json calls it.
        prefix: what names of the body begin with, and what files of a bare body leave out.
        ignored: regular expressions for names of tensors that hold no weights (masks, tables).
        compared: attributes of the arguments that decide whether two models are the same.
    """

    family: str
    model_type: str
    architecture: str
    prefix: str
    ignored: tuple[str, ...] = ()
    compared: tuple[str, ...]

    def __init__(self, args: Any) -> None:
        self.args = args

    @property
    def tied_head(self) -> str | None:
        """The embedding's name, if the head shares its weight and files need not hold ``lm_head``."""
        return self.sources()["tok_embeddings.weight"].names[0] if self.args.tie_embeddings else None

    @classmethod
    @abstractmethod
    def args_from(cls, config: Mapping[str, Any]) -> Any:
        """Arguments of the model that a config.json describes.

        Raises:
            ValueError: it asks for something that the family here does not have; names the key.
        """

    @abstractmethod
    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Content of config.json for weights stored as ``dtype``."""

    @abstractmethod
    def list_sources(self) -> dict[str, Source]:
        """What ``sources`` returns, made anew."""

    @cache  # noqa: B019 (forms are few; 128 experts a layer are 36,000 names)
    def sources(self) -> dict[str, Source]:
        """Our parameter's name → where it is; a tied head is left out."""
        return self.list_sources()

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError naming every size in which a config.json differs from these arguments."""
        if config.get("model_type") != self.model_type:
            raise ValueError(
                f"its config.json has model_type = {config.get('model_type')!r}; model.name = "
                f"{self.family!r} at this size is {self.model_type!r} there"
            )
        theirs = self.args_from(config)
        different = [
            f"{name} is {getattr(theirs, name)} there and {getattr(self.args, name)} in this run"
            for name in self.compared
            if getattr(theirs, name) != getattr(self.args, name)
        ]
        if different:
            raise ValueError(f"its config.json describes another model: {'; '.join(different)}")


class ConfigReader:
    """Takes keys out of a config.json one by one, so that what nobody took is known at the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._left = dict(config)
        self.model_type = config.get("model_type")

    def take(self, *names: str, default: Any = None) -> Any:
        """The value under the first of ``names`` that is there; raises ValueError without a default."""
        values = [self._left.pop(name) for name in names if name in self._left]
        values = [value for value in values if value is not None]
        if values:
            return values[0]
        if default is None:
            raise ValueError(f"config.json has no {names[0]}")
        return default

    def require(self, name: str, allowed: Collection[Any]) -> None:
        """Refuse a value other than those; a key that is absent or null is fine."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            self._refuse(name, value)

    def rope(self, theta: float) -> tuple[float, RopeScaling | None]:
        """theta and Llama 3's scaling, from ``rope_parameters`` or the older ``rope_theta`` and its like.

        theta: for a config that names none.
        """
        name = "rope_parameters" if self._left.get("rope_parameters") else "rope_scaling"
        rope = dict(self._left.pop(name, None) or {})
        self._left.pop("rope_scaling", None)
        theta = float(self._left.pop("rope_theta", None) or rope.get("rope_theta") or theta)
        rope.pop("rope_theta", None)
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
        rope.pop("type", None)
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            self._refuse(f"{name}.partial_rotary_factor", "other than 1")
        if kind == "default":
            return theta, None
        if kind != "llama3":
            self._refuse(f"{name}.rope_type", kind)
        known = {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_context",
        }
        for key, value in rope.items():
            if key not in known:
                self._refuse(f"{name}.{key}", value)
        return theta, RopeScaling(**{known[key]: value for key, value in rope.items()})

    def finish(self) -> None:
        """Refuse whatever else is switched on."""
        for name, value in self._left.items():
            if name not in HARMLESS and value not in (None, False, 0, "", [], {}):
                self._refuse(name, value)

    def _refuse(self, name: str, value: Any) -> None:
        raise ValueError(
            f"config.json asks for {name} = {value!r}, which titanforge's {self.model_type} does not have"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
