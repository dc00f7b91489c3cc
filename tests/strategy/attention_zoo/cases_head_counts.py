"""Sources of the number of heads, and uses of it other than views."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from strategy.attention_zoo.zoo import (
    D_MODEL,
    HEAD_DIM,
    NUM_HEADS,
    Block,
    Cases,
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

cases = Cases()


@cases.add("plain with Llama's names", Sharding.HEADS)
@cases.add("five heads", Sharding.ANY, n_heads=5)
@cases.add("six heads", Sharding.HEADS, n_heads=6)
@cases.variant("in a module of its own", Sharding.HEADS, Module)
class Plain(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("scale from d_model // n_heads", Sharding.SHARDS)
class ScaleFromCount(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / (D_MODEL // self.n_heads) ** 0.5
        return self.wo(merge_heads(causal_weights(scores) @ v))


@cases.add("ALiBi slopes computed in the forward", Sharding.SHARDS)
class Alibi(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        slopes = 2.0 ** (-8.0 / self.n_heads * torch.arange(1, self.n_heads + 1))
        positions = torch.arange(x.shape[1])
        distances = positions[None, :] - positions[:, None]
        scores = q @ k.transpose(-2, -1) / 2 + slopes[:, None, None] * distances
        return self.wo(merge_heads(causal_weights(scores) @ v))


@cases.add("mean over heads subtracted from the scores", Sharding.SHARDS)
class MeanOverHeads(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / 2
        return self.wo(merge_heads(causal_weights(scores - scores.mean(1, keepdim=True)) @ v))


@cases.add("heads vary fastest in the projections", Sharding.SHARDS)
class HeadsVaryFastest(Separate):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, self.head_dim, self.n_heads).permute(0, 3, 1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        return self.wo(attend(q, k, v).permute(0, 2, 3, 1).reshape(b, t, -1))


@cases.add("factor 1 + 1 / n_heads", Sharding.SHARDS)
class FactorFromCount(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v))) * (1 + 1 / self.n_heads)


@cases.add("view with D // n_heads", Sharding.SHARDS)
class HeadDimFromCount(Separate):
    def forward(self, x: Tensor) -> Tensor:
        b, t, dim = x.shape
        q, k, v = (
            layer(x).view(b, t, self.n_heads, dim // self.n_heads).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        return self.wo(merge_heads(attend(q, k, v)))


@cases.variant("output reshaped to d_model", Sharding.SHARDS, Vectors)
class OutputOfWidth(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        return self.o_proj(attend(q, k, v).transpose(1, 2).reshape(*hidden_states.shape[:2], D_MODEL))


@cases.add("head count only in a config", Sharding.SHARDS)
class CountInConfig(HuggingFace):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=self.num_heads)
        del self.num_heads, self.num_key_value_heads

    def forward(self, x: Tensor) -> Tensor:
        num_heads = self.config.num_attention_heads
        q, k, v = (split_heads(layer(x), num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(merge_heads(attend(q, k, v)))


@cases.variant("head count a constant of the file", Sharding.SHARDS)
class CountIsConstant(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), NUM_HEADS) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.variant("head count from the layer's out_features", Sharding.SHARDS, Vectors)
class CountFromLayer(HuggingFace):
    def forward(self, x: Tensor) -> Tensor:
        num_heads = self.q_proj.out_features // self.head_dim
        q, k, v = (split_heads(layer(x), num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(merge_heads(attend(q, k, v)))


@cases.variant("views by head_dim alone", Sharding.HEADS, Vectors)
class ViewsByHeadDim(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(hidden_states.to(layer.weight.dtype)).view(shape).transpose(1, 2) for layer in layers)
        return self.o_proj(merge_heads(attend(q, k, v)))


@cases.add("unknown names of counts", Sharding.ANY)
class UnknownNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.dk = NUM_HEADS, HEAD_DIM
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D_MODEL, D_MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, self.h, self.dk).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


class _DividesByHeads(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) / self.attn.n_heads
        return x + self.mlp(self.norm2(x))


@cases.add("head count read by the block", Sharding.SHARDS, lambda attention: Tokens(attention, _DividesByHeads))
class CountReadByBlock(Plain):
    """The same attention; the block around it divides by its head count."""


@cases.add("head count read by a helper method", Sharding.SHARDS)
class CountInHelper(Separate):
    def _scale(self) -> float:
        return (D_MODEL / self.n_heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(causal_weights(q @ k.transpose(-2, -1) * self._scale()) @ v))


@cases.add("head count a property", Sharding.SHARDS)
class CountIsProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D_MODEL, D_MODEL) for _ in range(4))

    @property
    def num_heads(self) -> int:
        return D_MODEL // self.head_dim

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(merge_heads(attend(q, k, v)))


@cases.add("a loop over heads", Sharding.HEADS)
class LoopOverHeads(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        outputs = []
        for head in range(self.n_heads):
            features = slice(head * self.head_dim, (head + 1) * self.head_dim)
            outputs.append(causal_weights(q[..., features] @ k[..., features].transpose(-2, -1) / 2) @ v[..., features])
        return self.wo(torch.cat(outputs, dim=-1))


@cases.variant("a loop over heads that weighs them by their number", Sharding.SHARDS)
class LoopWithNumbers(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        outputs = [attend(q[:, i], k[:, i], v[:, i]) / (1 + i) for i in range(self.n_heads)]
        return self.wo(torch.cat(outputs, dim=-1))
