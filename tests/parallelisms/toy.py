"""A tiny model with the attribute names and methods that the parallelisms expect."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 33, 12, 8  # 33 and 12 divide unevenly over 2 and 4 ranks, and 5 blocks' norms too


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 2 * width + 1, bias=False)
        self.down = nn.Linear(2 * width + 1, width, bias=True)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x) * table.to(x.dtype)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return x + self.down(F.silu(self.up(x)))


class Head(nn.Linear):
    """Logits, or with labels the summed loss, whose chunks share one read of the weight."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        weight = self.weight
        if labels is None:
            return F.linear(hidden, weight)
        chunks = zip(hidden.flatten(0, 1).chunk(2), labels.flatten().chunk(2))
        losses = [
            F.cross_entropy(F.linear(h, weight).float(), y, ignore_index=-100, reduction="sum")
            for h, y in chunks
        ]
        return torch.stack(losses).sum()


class Toy(nn.Module):
    """tokens [B, T] -> hidden [B, T, D]."""

    def __init__(self, layers: int = 2, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.norm = nn.RMSNorm(width)
        self.output = Head(width, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("table", torch.ones(width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.table)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)

    def loss_sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.output(hidden, labels)


def make_toy(layers: int = 2, tied: bool = False, width: int = WIDTH, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    model = Toy(layers, tied, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def global_batch(samples: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """tokens and labels [samples, LENGTH]; a different number of labels is ignored in each sample."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (samples, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (samples, LENGTH), generator=generator)
    for sample in range(samples):
        labels[sample, : (3 * sample) % LENGTH] = -100
    return tokens, labels


def backward(model: nn.Module, tokens: Tensor, labels: Tensor, valid: int) -> Tensor:
    """One micro-batch: loss sum divided by the valid tokens of the whole global batch."""
    loss = model.loss_sum(model(tokens), labels) / valid
    loss.backward()
    return loss.detach()
