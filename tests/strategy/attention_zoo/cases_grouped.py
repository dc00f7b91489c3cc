"""Fewer heads of keys and values than of queries: ways to repeat them, and their order in a fused layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from strategy.attention_zoo.zoo import (
    D_MODEL,
    HEAD_DIM,
    NUM_HEADS,
    Cases,
    HuggingFace,
    Module,
    Separate,
    Sharding,
    Vectors,
    attend,
    merge_heads,
    split_heads,
)
from torch import Tensor, nn

cases = Cases()


@cases.add("multi-query", Sharding.SHARDS, n_kv_heads=1)
class MultiQuery(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.wq(x), self.n_heads)
        k, v = (split_heads(layer(x), 1) for layer in (self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("grouped: repeat_interleave", Sharding.HEADS, n_kv_heads=4)
@cases.variant("grouped: repeat_interleave, biases, in a module", Sharding.HEADS, Module, n_kv_heads=6, bias=True)
class RepeatInterleave(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.wq(x), self.n_heads)
        groups = self.n_heads // self.n_kv_heads
        k, v = (split_heads(layer(x), self.n_kv_heads).repeat_interleave(groups, dim=1) for layer in (self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("grouped: expand", Sharding.HEADS, Vectors, num_key_value_heads=6)
class Expand(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        b, t, _ = hidden_states.shape
        q = split_heads(self.q_proj(hidden_states), self.num_heads)
        groups = self.num_heads // self.num_key_value_heads
        k, v = (
            split_heads(layer(hidden_states), self.num_key_value_heads)[:, :, None]
            .expand(b, self.num_key_value_heads, groups, t, self.head_dim)
            .reshape(b, self.num_heads, t, self.head_dim)
            for layer in (self.k_proj, self.v_proj)
        )
        return self.o_proj(merge_heads(attend(q, k, v)))


@cases.add("grouped: enable_gqa", Sharding.HEADS, n_kv_heads=4)
class EnableGqa(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.wq(x), self.n_heads)
        k, v = (split_heads(layer(x), self.n_kv_heads) for layer in (self.wk, self.wv))
        return self.wo(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


@cases.variant("grouped: queries viewed as [g, h / g]", Sharding.ANY, n_kv_heads=6)
class QueriesInGroups(Separate):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = (
            self.wq(x)
            .view(b, t, self.n_kv_heads, self.n_heads // self.n_kv_heads, self.head_dim)
            .permute(0, 2, 3, 1, 4)
        )
        k, v = (split_heads(layer(x), self.n_kv_heads)[:, :, None] for layer in (self.wk, self.wv))
        return self.wo(attend(q, k, v).permute(0, 3, 1, 2, 4).flatten(2))


@cases.add("grouped: keys tiled over the queries", Sharding.SHARDS, n_kv_heads=4)
class Tiled(Separate):
    """Query head i attends to key head i % g, which may be on another rank."""

    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.wq(x), self.n_heads)
        groups = self.n_heads // self.n_kv_heads
        k, v = (split_heads(layer(x), self.n_kv_heads).repeat(1, groups, 1, 1) for layer in (self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.variant("grouped: group size a constant", Sharding.SHARDS, Vectors, num_key_value_heads=4)
class ConstantGroups(HuggingFace):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, 4, 3, HEAD_DIM).permute(0, 2, 3, 1, 4).flatten(1, 2)
        k, v = (split_heads(layer(x), 4).repeat_interleave(3, dim=1) for layer in (self.k_proj, self.v_proj))
        return self.o_proj(merge_heads(attend(q, k, v)))


@cases.add("grouped and fused: [g, h / g + 2, d] as Falcon", Sharding.SHARDS, Vectors)
class FusedFalcon(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = NUM_HEADS, 4, HEAD_DIM
        features = (NUM_HEADS + 2 * self.num_kv_heads) * HEAD_DIM
        self.query_key_value = nn.Linear(D_MODEL, features, bias=False)
        self.dense = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, t, _ = hidden_states.shape
        groups = self.num_heads // self.num_kv_heads
        fused = self.query_key_value(hidden_states).view(b, t, self.num_kv_heads, groups + 2, self.head_dim)
        q, k, v = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        k, v = (each.expand_as(q) for each in (k, v))
        q, k, v = (each.flatten(2, 3).transpose(1, 2) for each in (q, k, v))
        return self.dense(merge_heads(attend(q, k, v)))


@cases.add("grouped and fused: split sizes", Sharding.SHARDS, num_kv_heads=4)
@cases.variant("multi-query and fused: split sizes", Sharding.SHARDS, Module, num_kv_heads=1)
class FusedSizes(nn.Module):
    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = NUM_HEADS, num_kv_heads
        self.sizes = [n * HEAD_DIM for n in (NUM_HEADS, num_kv_heads, num_kv_heads)]
        self.Wqkv, self.out_proj = nn.Linear(D_MODEL, sum(self.sizes)), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).split(self.sizes, dim=-1)
        q = split_heads(q, self.n_heads)
        groups = self.n_heads // self.n_kv_heads
        k, v = (split_heads(each, self.n_kv_heads).repeat_interleave(groups, dim=1) for each in (k, v))
        return self.out_proj(merge_heads(attend(q, k, v)))


@cases.variant("grouped: keys of a latent", Sharding.ANY)
class Latent(nn.Module):
    """Keys and values of all heads from one narrow layer, as in multi-head latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = NUM_HEADS, HEAD_DIM
        self.wq, self.kv_down = nn.Linear(D_MODEL, D_MODEL, bias=False), nn.Linear(D_MODEL, 10, bias=False)
        self.kv_norm = nn.LayerNorm(10)
        self.kv_up, self.wo = nn.Linear(10, 2 * D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = split_heads(self.wq(x), self.n_heads)
        both = self.kv_up(self.kv_norm(self.kv_down(x))).view(b, t, self.n_heads, 2 * self.head_dim)
        k, v = torch.chunk(both.transpose(1, 2), 2, dim=-1)
        return self.wo(merge_heads(attend(q, k, v)))
