"""Modules that are not ours: coverage printed, ten steps equal to the unfused run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.forge.toy import fuse, options_of, ordinary, train, weights
from titanforge.forge import attach
from titanforge.optim import build_rule


class VisionTransformer(nn.Module):
    """A small ViT: patches by convolution, a class token, learned positions."""

    def __init__(self, dim: int = 32, patches: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(VisionBlock(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class VisionBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class MlpMixer(nn.Module):
    """Mixes patches and channels in turn; linears see transposed, non-contiguous inputs."""

    def __init__(self, dim: int = 24, patches: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.tokens = nn.ModuleList(_mlp(patches, 40) for _ in range(2))
        self.channels = nn.ModuleList(_mlp(dim, 48) for _ in range(2))
        self.head = nn.Linear(dim, 10, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(F.unfold(images, 4, stride=4).transpose(1, 2))
        for layer in range(2):
            x = x + self.tokens[layer](self.norms[2 * layer](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[layer](self.norms[2 * layer + 1](x))
        return self.head(x.mean(1))


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def image_loss(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return F.cross_entropy(model(images), torch.randint(0, 10, (4,), generator=generator))


class Encoder(nn.Module):
    """`torch.nn.TransformerEncoder` with dropout: its attention reads a linear's weight past the linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


def text_loss(model: nn.Module, number: int) -> Tensor:
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(number))
    torch.manual_seed(number)  # of dropout: the probe has drawn none of it
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def check(
    make: Callable[[], nn.Module],
    loss: Callable[[Any, int], Tensor],
    name: str,
    excluded: dict[str, str],
    bare: bool = False,
) -> None:
    """Coverage as expected, and ten steps with the ordinary engine's losses and weights.

    bare: the rule alone is attached, without groups.
    """
    torch.manual_seed(0)
    fused = make()
    torch.manual_seed(0)
    plain = make()
    options = options_of(name)
    if bare:
        optimizer = attach(fused, build_rule(name), options={"lr": options.lr}, probe=lambda: loss(fused, 0))
    else:
        optimizer = fuse(fused, options, loss=loss)
    print(optimizer.report())
    left = {line.name: line.plan.why for line in optimizer.plan if not line.plan.fused}
    assert left.keys() == excluded.keys()
    assert all(excluded[key] in left[key] for key in left)
    losses = train(fused, optimizer, 0, 10, loss=loss)
    assert losses == pytest.approx(train(plain, ordinary(plain, options), 0, 10, loss=loss), abs=1e-4)
    ours, theirs = weights(fused), weights(plain)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["adamw", "muon", "adam_mini"])
def test_vision_transformer(name: str) -> None:
    plain = "a plain parameter of"
    check(
        VisionTransformer,
        image_loss,
        name,
        {"patch.weight": plain + " Conv2d", "class_token": plain, "positions": plain},
        bare=True,
    )


@pytest.mark.parametrize("name", ["adamw", "scion", "adafactor"])
def test_mlp_mixer(name: str) -> None:
    check(MlpMixer, image_loss, name, {})


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_transformer_encoder(name: str) -> None:
    excluded = {}
    for layer in range(2):
        attention = f"encoder.layers.{layer}.self_attn"
        excluded |= {
            f"{attention}.in_proj_weight": "a plain parameter of MultiheadAttention",
            f"{attention}.in_proj_bias": "a plain parameter of MultiheadAttention",
            f"{attention}.out_proj.weight": "bypassed",
            f"{attention}.out_proj.bias": "bypassed",
        }
    check(Encoder, text_loss, name, excluded)


def test_hugging_face_qwen3() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is no dependency of ours")

    def make() -> nn.Module:
        config = transformers.Qwen3Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        return transformers.Qwen3ForCausalLM(config).train()

    def loss(model: Any, number: int) -> Tensor:
        ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(number))
        return model(input_ids=ids, labels=ids).loss

    check(make, loss, "adamw", {})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_hugging_face_mamba2(name: str) -> None:
    """Its convolution's weights are handed to a function, its state space has parameters of its own."""
    transformers = pytest.importorskip("transformers", reason="transformers is no dependency of ours")

    def make() -> nn.Module:
        config = transformers.Mamba2Config(
            vocab_size=50,
            hidden_size=32,
            num_heads=4,
            head_dim=16,
            state_size=8,
            n_groups=2,
            chunk_size=4,
            num_hidden_layers=2,
            tie_word_embeddings=False,
            use_cache=False,
        )
        return transformers.Mamba2ForCausalLM(config).train()

    def loss(model: Any, number: int) -> Tensor:
        ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(number))
        return model(input_ids=ids, labels=ids).loss

    excluded = {}
    for layer in range(2):
        mixer = f"backbone.layers.{layer}.mixer"
        excluded |= {
            f"{mixer}.{own}": "a plain parameter of Mamba2Mixer" for own in ("A_log", "D", "dt_bias")
        }
        excluded |= {f"{mixer}.conv1d.{part}": "bypassed" for part in ("weight", "bias")}
    check(make, loss, name, excluded)
