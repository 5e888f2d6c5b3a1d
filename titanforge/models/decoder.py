"""What every family's model is: the calls that trainer, checkpoint and sampling rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from titanforge.models.layers.attention import AttentionMask, build_attention_mask
from titanforge.models.layers.loss import OutputHead
from titanforge.models.layers.rope import RotaryEmbedding, Rotation

GROUPS: tuple[str, ...] = ("embedding", "attention", "feed_forward", "norms", "head")


class Decoder(nn.Module):
    """A stack of blocks between an embedding and a head. A family sets the attributes below.

    A pipeline stage sets what it lacks to None, and drops blocks from ``layers``. With
    ``args.tie_embeddings`` the head's weight *is* ``tok_embeddings.weight``, one Parameter under both names:
    whoever shards the two modules must put them into one group (the root's), or one of them would train a
    copy.

    Attributes:
        args: sizes, with ``dim``, ``n_layers``, ``n_heads``, ``n_kv_heads``, ``head_dim``, ``ffn_dim``,
            ``vocab_size``, ``max_seq_len`` and ``tie_embeddings``.
        rope: tables of the rotary embedding; None: positions are embedded otherwise.
        build_mask: document ids → what the blocks' attention takes as its mask.
    """

    args: Any
    tok_embeddings: nn.Embedding | None
    rope: RotaryEmbedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    output: OutputHead | None
    build_mask = staticmethod(build_attention_mask)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_at: int | None = None,
    ) -> torch.Tensor:
        """One call for training, ``model(tokens, positions, document_ids, labels)``, and for everything else.

        tokens: int64 [B, T]; on a later pipeline stage the previous one's hidden states [B, T, D]. positions:
        int64 [B, T] in 0 … max_seq_len-1; None: 0 … T-1. document_ids: int64 [B, T]; a token attends to
        earlier ones of the same document. None: to all earlier. labels: int64 [B, T], -100 where a token is
        not counted.

        Returns the float32 sum of the token losses if ``labels`` is given; the logits [B, V] of one place in
        the sequences if ``logits_at`` is; else the hidden states [B, T, D] after the final norm. Raises
        ValueError for a sequence longer than the model was built for.
        """
        x_BTD, rotation, mask = self._enter(tokens, positions, document_ids)
        for block in self.layers.values():
            x_BTD = block(x_BTD, rotation, mask)
        return self._leave(x_BTD, labels, logits_at)

    def _enter(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, document_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, Rotation | None, AttentionMask]:
        """What the blocks are given: hidden states, rotation and mask."""
        T = tokens.shape[1]
        if self.args.max_seq_len < T:
            raise ValueError(f"sequence of {T} tokens; the model was built for {self.args.max_seq_len}")
        x_BTD = self.embed(tokens, positions) if self.tok_embeddings is not None else tokens
        rotation = self.rope(positions, T) if self.rope is not None else None
        return x_BTD, rotation, self.build_mask(document_ids)

    def _leave(self, x_BTD: torch.Tensor, labels: torch.Tensor | None, logits_at: int | None) -> torch.Tensor:
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if labels is not None:
            return self.loss_sum(x_BTD, labels)
        if logits_at is not None:
            return self.logits(x_BTD[:, logits_at])
        return x_BTD

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """int64 [B, T] → [B, T, D]; ``positions`` matter where they are embedded here."""
        assert self.tok_embeddings is not None
        return self.tok_embeddings(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] → [..., V], in the dtype of the weights."""
        return self._head()(hidden)

    def loss_sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Float32 scalar: the sum, not the mean, of the losses of the tokens whose label is not -100."""
        return self._head()(hidden, labels)

    def _head(self) -> OutputHead:
        if self.output is None:
            raise RuntimeError("this pipeline stage has no output head")
        return self.output

    def _tie(self) -> None:
        if self.args.tie_embeddings and self.output is not None and self.tok_embeddings is not None:
            # The parameter itself: under `apply_mixed_precision` the attribute reads as a cast copy of it.
            self.output.register_parameter("weight", self.tok_embeddings._parameters["weight"])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device makes a new Parameter per name: tie the two again.
        super()._apply(fn, recurse)
        self._tie()
        return self

    # ------------------------------------------------------------------ sizes

    def num_parameters(self) -> dict[str, int]:
        """Parameters present here: embedding, attention, feed_forward, norms, head (0 if tied)."""
        groups: dict[str, int] = dict.fromkeys(GROUPS, 0)
        for name, parameter in self.named_parameters():  # names a tied parameter once
            groups[_group_of(name)] += parameter.numel()
        return groups

    def active_block_weights(self) -> int:
        """Weights of one block's matrices that one token is multiplied with."""
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward per token, a multiply-add counting as two.

        Matrices: each weight takes part in one multiply-add per token in forward and in two in backward
        (gradients of the input and of the weight): 6 per weight of the blocks' linears and of the head, tied
        or not; of a layer of experts those that a token is sent to. The embedding is a look-up: 0. Attention:
        q kᵀ and p v are 2·H·E operations each for every (query, key) pair, 4·H·E together, twice that again
        in backward: 12·H·E. A causal query at place t sees t + 1 keys, the mean over a sequence is
        (T + 1)/2: 6·H·E·(T + 1) per token and layer. Norms, softmax, RoPE are left out, as is whatever is
        computed twice (recomputed activations, the scores that flash attention rebuilds): these are the
        model's operations, the numerator of MFU. Document masks are not looked at: they would make the figure
        depend on the data. Sizes are those of the whole model, whatever part of it lives here.
        """
        args = self.args
        matrices = args.n_layers * self.active_block_weights() + args.dim * args.vocab_size
        return float(6 * matrices + 6 * args.n_layers * args.n_heads * args.head_dim * (seq_len + 1))

    # ------------------------------------------------------------------ once a step

    def step_statistics(self) -> torch.Tensor | None:
        """What the trainer sums over the data ranks, in place, before ``end_step``; None: nothing."""
        return None

    def end_step(self, apply_flag: torch.Tensor) -> None:
        """Use and clear the step's statistics, once per optimizer step on every rank.

        apply_flag: scalar on the model's device; 0: the step is a no-op, and so must this be.
        """

    def metrics(self) -> dict[str, torch.Tensor]:
        """Scalars of the last step worth logging, already over all ranks, by metric name."""
        return {}


def _group_of(name: str) -> str:
    parts = name.split(".")
    if "tok_embeddings" in parts or "pos_embeddings" in parts:
        return "embedding"
    if "output" in parts:
        return "head"
    if any(part.endswith("norm") for part in parts):
        return "norms"
    return "attention" if "attention" in parts else "feed_forward"


def vocabulary(args: Any) -> int:
    """``args.vocab_size``; raises ValueError if neither the size nor a tokenizer gave one."""
    if args.vocab_size is None:
        raise ValueError("model.vocab_size: neither this size nor a tokenizer gives the vocabulary")
    return args.vocab_size
