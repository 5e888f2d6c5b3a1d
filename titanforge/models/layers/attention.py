"""Causal self-attention with grouped key/value heads, within documents or across the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from titanforge.models.layers.init_spec import Constant, InitSpec, Normal
from titanforge.models.layers.norm import RMSNorm
from titanforge.models.layers.projections import Projecting
from titanforge.models.layers.rope import Rotation

AttentionMask = torch.Tensor | BlockMask | None
"""None: causal. bool [B, 1, T, T]: True where a query (row) sees a key. BlockMask: that for FlexAttention."""

MASK_BLOCK = 128  # FlexAttention's default tile; its kernels want multiples of it

# cuDNN's kernel is the fastest on Hopper; each next one takes what the one before refuses.
CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def build_attention_mask(document_ids_BT: torch.Tensor | None) -> AttentionMask:
    """The mask that keeps attention causal and within a document; built once per forward for all layers.

    ``document_ids_BT``: int [B, T], any integers; two tokens see each other if theirs are equal. On CUDA it
    is a BlockMask, elsewhere a boolean tensor (FlexAttention has no backward on the CPU).
    """
    if document_ids_BT is None:
        return None
    if document_ids_BT.is_cuda:
        return document_block_mask(document_ids_BT)
    same_document = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    return same_document.tril()[:, None]


def document_block_mask(document_ids_BT: torch.Tensor) -> BlockMask:
    """The same mask as 128 x 128 blocks: absent, full, or decided element by element.

    Derived from the least and greatest id of each block, (T/128)² numbers, where ``create_block_mask`` would
    form all T² of them. Blocks whose ranges of ids overlap are at worst visited in vain, so any ids are
    right; for ids that never fall along a sequence, as packing makes them, the blocks are exact.
    """
    B, T = document_ids_BT.shape
    blocks = -(-T // MASK_BLOCK)
    padding = blocks * MASK_BLOCK - T
    padded = torch.cat((document_ids_BT, document_ids_BT[:, -1:].expand(B, padding)), dim=1)
    low, high = padded.view(B, blocks, MASK_BLOCK).aminmax(dim=-1)
    low_q, high_q, low_k, high_k = low[:, :, None], high[:, :, None], low[:, None, :], high[:, None, :]
    visible = ((low_k <= high_q) & (high_k >= low_q)).tril()
    full = (visible & (low_q == high_q) & (low_k == high_k)).tril(diagonal=-1)
    if padding:
        full[:, -1] = False  # the last rows' block reaches past the sequence
    partial = visible & ~full

    def same_document_causal(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (q >= k) & (document_ids_BT[b, q] == document_ids_BT[b, k])

    return BlockMask.from_kv_blocks(
        *_count_and_list(partial),
        *_count_and_list(full),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=same_document_causal,
        seq_lengths=(T, T),
    )


def _count_and_list(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, q blocks, k blocks] → number [B, 1, q] and indices [B, 1, q, k] of the True ones."""
    number = blocks.sum(dim=-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return number[:, None], indices[:, None]


@cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention)  # on first use: importing the compiler takes seconds


def attend(
    q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(E)) v → [B, H, T, E]; query head h reads key/value head h // (H/K)."""
    grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
    if isinstance(mask, BlockMask):
        # Uncompiled, flex_attention would form all T² scores; inside a compiled block it is traced as it is.
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        output = flex(q_BHTE, k_BKTE, v_BKTE, block_mask=mask, enable_gqa=grouped)
        assert isinstance(output, torch.Tensor)
        return output
    if not q_BHTE.is_cuda:
        return F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    if grouped and q_BHTE.dtype == torch.float32:
        # The only float32 kernel that does not form all T² scores wants as many key as query heads.
        repeats = q_BHTE.shape[1] // k_BKTE.shape[1]
        k_BKTE, v_BKTE = k_BKTE.repeat_interleave(repeats, 1), v_BKTE.repeat_interleave(repeats, 1)
        grouped = False
    with sdpa_kernel(CUDA_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )


class Attention(Projecting):
    """Multi-head attention with K key/value heads for H query heads (Ainslie et al. 2023, "GQA") and RoPE.

    Head counts are never written down in forward: the -1 of each view infers them, so a module whose matrices
    were split over heads runs as it is. ``attend`` may be replaced by one that sees more tokens than these.
    """

    projections = (("wq", "wk", "wv"),)

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        depth_std: float,
        head_dim: int | None = None,
        qk_norm_eps: float | None = None,
    ) -> None:
        """``depth_std``: initial standard deviation of the output matrix.

        head_dim: E; None: D / H. qk_norm_eps: normalise each query and key head by its root mean square
        before the rotation, with one weight [E] for all query heads and one for all key heads (Qwen3);
        None: do not.
        """
        super().__init__()
        self.head_dim = head_dim or dim // n_heads
        self.depth_std = depth_std
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.attend = attend
        self.q_norm = RMSNorm(self.head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(self.head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.normalised_head = self.head_dim if qk_norm_eps is not None else None

    def forward(self, x_BTD: torch.Tensor, rotation: Rotation, mask: AttentionMask) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q_BTN, k_BTN, v_BTN = self.project(x_BTD, ("wq", "wk", "wv"))
        q_BTHE = q_BTN.view(B, T, -1, self.head_dim)
        k_BTKE = k_BTN.view(B, T, -1, self.head_dim)
        # Of a merged product v is a part: attention, which keeps v for backward, would keep q and k with it.
        # Where they have norms these keep q and k as they are anyway.
        v_BTKE = (v_BTN if self.q_norm else v_BTN.contiguous()).view(B, T, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BTHE, k_BTKE = rotation(q_BTHE), rotation(k_BTKE)
        out_BHTE = self.attend(q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), mask)
        return self.wo(out_BHTE.transpose(1, 2).reshape(B, T, -1))

    def init_spec(self) -> dict[str, InitSpec]:
        return {
            "wq.weight": Normal(0.02),
            "wk.weight": Normal(0.02),
            "wv.weight": Normal(0.02),
            "wo.weight": Normal(self.depth_std),
        }


class FusedAttention(nn.Module):
    """Multi-head attention as in GPT-2: one matrix for q, k and v, biases, no rotation.

    ``wqkv``'s rows are all of q, then all of k, then all of v, each head by head.
    """

    def __init__(self, dim: int, n_heads: int, depth_std: float) -> None:
        """``depth_std``: initial standard deviation of the output matrix."""
        super().__init__()
        self.head_dim = dim // n_heads
        self.depth_std = depth_std
        self.attend = attend
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x_BTD: torch.Tensor, rotation: Rotation | None, mask: AttentionMask) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        qkv_3BHTE = self.wqkv(x_BTD).view(B, T, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        q_BHTE, k_BHTE, v_BHTE = qkv_3BHTE.unbind(0)
        out_BHTE = self.attend(q_BHTE, k_BHTE, v_BHTE, mask)
        return self.wo(out_BHTE.transpose(1, 2).reshape(B, T, -1))

    def init_spec(self) -> dict[str, InitSpec]:
        return {
            "wqkv.weight": Normal(0.02),
            "wqkv.bias": Constant(0.0),
            "wo.weight": Normal(self.depth_std),
            "wo.bias": Constant(0.0),
        }
