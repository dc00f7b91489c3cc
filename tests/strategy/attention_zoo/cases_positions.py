"""Positions: tables of biases, rotations, masks, and a cache of keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from strategy.attention_zoo.zoo import (
    HEAD_DIM,
    NUM_HEADS,
    Cases,
    Fused,
    HuggingFace,
    Module,
    Separate,
    Sharding,
    Tokens,
    Vectors,
    attend,
    causal_weights,
    merge_heads,
    split_heads,
)
from torch import Tensor, nn

from support.models import rotary_tables

MAX_LENGTH = 16

cases = Cases()


@cases.add("T5's buckets of relative positions", Sharding.SHARDS)
class BucketBias(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.relative_attention_bias = nn.Embedding(7, NUM_HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        positions = torch.arange(x.shape[1])
        buckets = (positions[None, :] - positions[:, None]).clamp(-3, 3) + 3
        scores = q @ k.transpose(-2, -1) + self.relative_attention_bias(buckets).permute(2, 0, 1)
        return self.wo(merge_heads(scores.softmax(-1) @ v))


@cases.add("Swin's table of relative positions", Sharding.SHARDS, Vectors)
class TableBias(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * MAX_LENGTH - 1, NUM_HEADS))
        positions = torch.arange(MAX_LENGTH)
        self.register_buffer("relative_position_index", positions[:, None] - positions + MAX_LENGTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = (split_heads(each, self.num_heads) for each in self.qkv(x).chunk(3, dim=-1))
        bias = self.relative_position_bias_table[self.relative_position_index[:t, :t].flatten()]
        scores = q @ k.transpose(-2, -1) / 2 + bias.view(t, t, -1).permute(2, 0, 1)
        return self.proj(merge_heads(scores.softmax(-1) @ v))


@cases.variant("ALiBi slopes in a buffer", Sharding.SHARDS, Vectors)
class AlibiBuffer(HuggingFace):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** (-8 / NUM_HEADS * torch.arange(1, NUM_HEADS + 1)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-2, -1) / 2 + self.slopes[:, None, None] * torch.arange(x.shape[1])
        return self.o_proj(merge_heads(causal_weights(scores) @ v))


@cases.variant("ALiBi slopes in a buffer, sliced to n_heads", Sharding.SHARDS)
class AlibiSlice(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** (-torch.arange(1, 33) / 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        slopes = self.slopes[: self.n_heads, None, None]
        scores = q @ k.transpose(-2, -1) / 2 + slopes * torch.arange(x.shape[1])
        return self.wo(merge_heads(causal_weights(scores) @ v))


@cases.add("rotary, halves", Sharding.HEADS)
class RotaryHalves(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        cos, sin = (torch.cat((each, each), dim=-1) for each in rotary_tables(x.shape[1], HEAD_DIM, x.dtype))
        q, k = (each * cos + self._rotated(each) * sin for each in (q, k))
        return self.wo(merge_heads(attend(q, k, v)))

    @staticmethod
    def _rotated(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


@cases.add("rotary, interleaved pairs", Sharding.HEADS, Vectors)
class RotaryPairs(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        cos, sin = (
            each.repeat_interleave(2, dim=-1)
            for each in rotary_tables(hidden_states.shape[1], HEAD_DIM, hidden_states.dtype)
        )
        q, k = (each * cos + self._rotated(each) * sin for each in (q, k))
        return self.o_proj(merge_heads(attend(q, k, v)))

    @staticmethod
    def _rotated(heads: Tensor) -> Tensor:
        return torch.stack((-heads[..., 1::2], heads[..., ::2]), dim=-1).flatten(-2)


@cases.add("rotary, complex", Sharding.HEADS, Module, n_kv_heads=4)
class RotaryComplex(Separate):
    def __init__(self, n_kv_heads: int) -> None:
        super().__init__(n_kv_heads=n_kv_heads)
        self.register_buffer("freqs_cis", torch.complex(*rotary_tables(MAX_LENGTH, HEAD_DIM, torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        q = self._rotated(split_heads(self.wq(x), self.n_heads))
        k, v = (split_heads(layer(x), self.n_kv_heads) for layer in (self.wk, self.wv))
        groups = self.n_heads // self.n_kv_heads
        k, v = (each.repeat_interleave(groups, dim=1) for each in (self._rotated(k), v))
        return self.wo(merge_heads(attend(q, k, v)))

    def _rotated(self, heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.freqs_cis[: heads.shape[2]]).flatten(-2)


@cases.add("causal mask in a buffer", Sharding.HEADS)
class MaskBuffer(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(MAX_LENGTH, MAX_LENGTH).tril()[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(self.mask[:, :, :t, :t] == 0, -torch.inf)
        return self.wo(merge_heads(scores.softmax(-1) @ v))


@cases.add("sliding window", Sharding.HEADS, Vectors)
class SlidingWindow(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        positions = torch.arange(hidden_states.shape[1])
        distances = positions[:, None] - positions
        mask = (distances >= 0) & (distances < 3)
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


@cases.variant("windows that differ between heads", Sharding.SHARDS)
class WindowOfHead(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        positions = torch.arange(x.shape[1])
        windows = 1 + torch.arange(self.n_heads)[:, None, None]
        distances = (positions[:, None] - positions)[None]
        mask = (distances >= 0) & (distances < windows)
        return self.wo(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class _InTwoCalls(Tokens):
    """Processes a sequence in two calls, as generation does."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(ids[:, :3]), super().forward(ids[:, 3:])


@cases.add("cache of keys and values in the module", Sharding.ANY, _InTwoCalls)
class Cached(Separate):
    """In eval mode each call attends to the tokens of earlier calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_k: Tensor | None = None
        self.cache_v: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        if self.training:
            self.cache_k = self.cache_v = None
        else:
            if self.cache_k is not None:
                k, v = torch.cat((self.cache_k, k), dim=2), torch.cat((self.cache_v, v), dim=2)
            self.cache_k, self.cache_v = k.detach(), v.detach()
        return self.wo(merge_heads((q @ k.transpose(-2, -1) / 2).softmax(-1) @ v))


@cases.add("cache of keys and values in buffers", Sharding.ANY, _InTwoCalls)
class CachedInBuffers(Separate):
    """In eval mode each call replaces the oldest tokens by its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(2, NUM_HEADS, MAX_LENGTH, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        if not self.training:
            for cache, new in ((self.cache_k, k), (self.cache_v, v)):
                cache.copy_(torch.cat((cache, new.detach()), dim=2)[:, :, -MAX_LENGTH:])
            k, v = torch.cat((self.cache_k.clone(), k), dim=2), torch.cat((self.cache_v.clone(), v), dim=2)
        return self.wo(merge_heads((q @ k.transpose(-2, -1) / 2).softmax(-1) @ v))
