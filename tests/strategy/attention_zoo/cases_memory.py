"""Attention over another sequence, and torch's own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from strategy.attention_zoo.zoo import (
    D_MODEL,
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_HEADS,
    VOCAB,
    Block,
    Cases,
    HuggingFace,
    Mlp,
    Separate,
    Sharding,
    Tokens,
    attend,
    causal_mask,
    merge_heads,
    split_heads,
)
from torch import Tensor, nn

MEMORY_FEATURES = 18

cases = Cases()


class _MemoryModel(nn.Module):
    """Blocks that also get a memory: other embeddings of all ids but the first two, in reverse order."""

    def __init__(self, attention: Callable[[], nn.Module], features: int = D_MODEL, block: Any = Block) -> None:
        super().__init__()
        self.embedding, self.memory_embedding = nn.Embedding(VOCAB, D_MODEL), nn.Embedding(VOCAB, features)
        self.blocks = nn.ModuleList(block(attention()) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(D_MODEL, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x, memory = self.embedding(ids), self.memory_embedding(ids[:, 2:].flip(1))
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x)


@cases.add("cross-attention", Sharding.SHARDS, _MemoryModel)
class Cross(Separate):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = split_heads(self.wq(x), self.n_heads)
        k, v = (split_heads(layer(memory), self.n_heads) for layer in (self.wk, self.wv))
        return self.wo(merge_heads((q @ k.transpose(-2, -1) / 2).softmax(-1) @ v))


@cases.variant(
    "cross-attention to a narrower memory, grouped",
    Sharding.SHARDS,
    lambda attention: _MemoryModel(attention, MEMORY_FEATURES),
)
class CrossNarrow(HuggingFace):
    def __init__(self) -> None:
        super().__init__(num_key_value_heads=6)
        self.k_proj, self.v_proj = (nn.Linear(MEMORY_FEATURES, 6 * HEAD_DIM) for _ in range(2))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        q = split_heads(self.q_proj(hidden_states), self.num_heads)
        k, v = (
            split_heads(layer(encoder_hidden_states), self.num_key_value_heads).repeat_interleave(
                self.num_heads // self.num_key_value_heads, dim=1
            )
            for layer in (self.k_proj, self.v_proj)
        )
        return self.o_proj(merge_heads((q @ k.transpose(-2, -1) / 2).softmax(-1) @ v))


class _DecoderBlock(nn.Module):
    """Attends to the tokens, then with an instance of SelfOrCross to the memory."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn, self.cross_attn, self.mlp = attention, SelfOrCross(), Mlp()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(x)
        x = x + self.cross_attn(x, context=memory)
        return x + self.mlp(x)


@cases.variant(
    "self-attention and cross-attention of one class",
    Sharding.SHARDS,
    lambda attention: _MemoryModel(attention, block=_DecoderBlock),
)
class SelfOrCross(Separate):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        other = x if context is None else context
        q = split_heads(self.wq(x), self.n_heads)
        k, v = (split_heads(layer(other), self.n_heads) for layer in (self.wk, self.wv))
        scale = (D_MODEL // self.n_heads) ** -0.5
        return self.wo(merge_heads((q @ k.transpose(-2, -1) * scale).softmax(-1) @ v))


class _MaskModel(Tokens):
    """Makes one mask `[b, 1, t, t]` for all blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embedding(ids), causal_mask(ids.shape[1]) & (ids != 0)[:, None, None, :]
        mask = mask | torch.eye(ids.shape[1], dtype=torch.bool)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


@cases.variant("a mask given by the model", Sharding.HEADS, _MaskModel)
class GivenMask(Separate):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~mask, -torch.inf)
        return self.wo(merge_heads(scores.softmax(-1) @ v))


class _HeadMaskModel(Tokens):
    """Makes one bias `[h, t, t]` for all blocks."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__(attention)
        self.position_bias = nn.Parameter(torch.randn(NUM_HEADS, 16))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        bias = self.position_bias[:, (positions[:, None] - positions).abs()]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


@cases.variant("a bias of each head given by the model", Sharding.SHARDS, _HeadMaskModel)
class GivenBias(HuggingFace):
    def forward(self, hidden_states: Tensor, position_bias: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        return self.o_proj(merge_heads((q @ k.transpose(-2, -1) + position_bias).softmax(-1) @ v))


@cases.add("nn.MultiheadAttention", Sharding.ANY, need_weights=False)
@cases.variant("nn.MultiheadAttention: need_weights", Sharding.ANY, need_weights=True)
@cases.add("nn.MultiheadAttention: add_bias_kv", Sharding.ANY, need_weights=True, add_bias_kv=True)
@cases.variant("nn.MultiheadAttention: dropout", Sharding.ANY, need_weights=False, dropout=0.1)
class TorchAttention(nn.Module):
    def __init__(self, need_weights: bool, **options: Any) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.inner = nn.MultiheadAttention(D_MODEL, NUM_HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        mask = ~causal_mask(x.shape[1])
        return self.inner(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]


@cases.add(
    "nn.MultiheadAttention: kdim and vdim", Sharding.ANY, lambda attention: _MemoryModel(attention, MEMORY_FEATURES)
)
class TorchCrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dims = {"kdim": MEMORY_FEATURES, "vdim": MEMORY_FEATURES}
        self.inner = nn.MultiheadAttention(D_MODEL, NUM_HEADS, batch_first=True, **dims)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x, memory, memory)[0]


@cases.add("nn.TransformerEncoderLayer", Sharding.ANY, lambda attention: Tokens(attention, lambda layer: layer))
class TorchEncoderLayer(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(D_MODEL, NUM_HEADS, 28, dropout=0.1, batch_first=True)
        self.dropout.p = 0.0  # of the MLP, not of the attention


@cases.variant(
    "nn.TransformerDecoderLayer", Sharding.ANY, lambda attention: _MemoryModel(attention, block=lambda layer: layer)
)
class TorchDecoderLayer(nn.TransformerDecoderLayer):
    def __init__(self) -> None:
        super().__init__(D_MODEL, NUM_HEADS, 28, dropout=0.0, batch_first=True, norm_first=True)


@cases.variant("the forward takes keywords only", Sharding.ANY, lambda attention: Tokens(attention, _KeywordBlock))
class KeywordsOnly(HuggingFace):
    def forward(self, *, hidden_states: Tensor, is_causal: bool = False) -> tuple[Tensor, None]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        heads = attend(q, k, v) if is_causal else (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.o_proj(merge_heads(heads)), None


class _KeywordBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(hidden_states=self.norm1(x), is_causal=True)[0]
        return x + self.mlp(self.norm2(x))
