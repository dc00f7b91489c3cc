"""Views written with einops."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from strategy.attention_zoo.zoo import (
    NUM_HEADS,
    Cases,
    Fused,
    HuggingFace,
    Module,
    Separate,
    Sharding,
    Vectors,
    attend,
    causal_weights,
)
from torch import Tensor

cases = Cases()


@cases.add("einops: (h d)", Sharding.HEADS)
class RearrangedHeads(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(layer(x), "b t (h d) -> b h t d", h=self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(rearrange(attend(q, k, v), "b h t d -> b t (h d)"))


@cases.add("einops: (d h)", Sharding.SHARDS, Module)
class RearrangedFeatures(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(layer(x), "b t (d h) -> b h t d", h=self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(rearrange(attend(q, k, v), "b h t d -> b t (d h)"))


@cases.add("einops: a Rearrange that keeps the count", Sharding.SHARDS)
class RearrangeLayer(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.split = Rearrange("b t (h d) -> b h t d", h=NUM_HEADS)
        self.merge = Rearrange("b h t d -> b t (h d)")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / 2
        return self.wo(self.merge(causal_weights(scores) @ v))


@cases.variant("einops: fused (three h d)", Sharding.SHARDS, Vectors)
class RearrangedFused(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.num_heads)
        return self.proj(rearrange(attend(q, k, v), "b h t d -> b t (h d)"))


@cases.variant("einops: repeat of grouped heads", Sharding.HEADS, Vectors, num_key_value_heads=6)
class RepeatedHeads(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        groups = self.num_heads // self.num_key_value_heads
        q = rearrange(self.q_proj(hidden_states), "b t (h d) -> b h t d", h=self.num_heads)
        k, v = (
            repeat(layer(hidden_states), "b t (g d) -> b (g r) t d", g=self.num_key_value_heads, r=groups)
            for layer in (self.k_proj, self.v_proj)
        )
        weights = causal_weights(torch.einsum("bhtd,bhsd->bhts", q, k) / 2)
        return self.o_proj(rearrange(torch.einsum("bhts,bhsd->bthd", weights, v), "b t h d -> b t (h d)"))
