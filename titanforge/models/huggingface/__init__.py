"""The models as Hugging Face's tools name and describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanforge.models.gpt2 import GPT2Args
from titanforge.models.huggingface.form import HuggingFaceForm, Source
from titanforge.models.huggingface.gpt2 import GPT2Form
from titanforge.models.huggingface.llama import LlamaForm
from titanforge.models.huggingface.qwen3 import Qwen3Form, Qwen3MoeForm
from titanforge.models.llama3 import Llama3Args
from titanforge.models.qwen3 import Qwen3Args

FORMS: dict[str, type[HuggingFaceForm]] = {
    form.model_type: form for form in (LlamaForm, Qwen3Form, Qwen3MoeForm, GPT2Form)
}
"""``model_type`` of a config.json → its form."""


def form_of(args: Any) -> HuggingFaceForm:
    """The form of a model with these arguments; raises ValueError if Hugging Face has no such model."""
    if isinstance(args, Llama3Args):
        return LlamaForm(args)
    if isinstance(args, Qwen3Args):
        return Qwen3MoeForm(args) if args.n_experts else Qwen3Form(args)
    if isinstance(args, GPT2Args):
        return GPT2Form(args)
    raise ValueError(f"{type(args).__name__} has no form in Hugging Face's tools")


def form_from_config(config: Mapping[str, Any]) -> HuggingFaceForm:
    """The form, with our arguments, of what a config.json describes; ValueError names what we lack."""
    kind = config.get("model_type")
    if kind not in FORMS:
        raise ValueError(f"config.json has model_type = {kind!r}; read are {', '.join(FORMS)}")
    form = FORMS[kind]
    return form(form.args_from(config))


__all__ = ["FORMS", "HuggingFaceForm", "Source", "form_from_config", "form_of"]
