"""Layers that compute queries, keys and values: names, containers, fused layouts, biases, tied weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from strategy.attention_zoo.zoo import (
    D_MODEL,
    HEAD_DIM,
    NUM_HEADS,
    Cases,
    Fused,
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

from support.models import Conv1D

cases = Cases()


@cases.add("biases in every projection", Sharding.HEADS, bias=True)
class Biases(Separate):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("query, key, value and proj", Sharding.ANY)
class QueryKeyValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = NUM_HEADS
        self.query, self.key, self.value, self.proj = (nn.Linear(D_MODEL, D_MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.query, self.key, self.value))
        return self.proj(merge_heads(attend(q, k, v)))


@cases.add("to_q, to_k, to_v and to_out with a dropout", Sharding.ANY, Vectors)
class ToQuery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = NUM_HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(D_MODEL, D_MODEL), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.heads) for layer in (self.to_q, self.to_k, self.to_v))
        return self.to_out(merge_heads(attend(q, k, v)))


@cases.add("projections in a ModuleDict", Sharding.ANY)
class InModuleDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = NUM_HEADS
        self.projections = nn.ModuleDict({name: nn.Linear(D_MODEL, D_MODEL) for name in ("wq", "wk", "wv", "wo")})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(self.projections[name](x), self.n_heads) for name in ("wq", "wk", "wv"))
        return self.projections["wo"](merge_heads(attend(q, k, v)))


@cases.variant("projections in a ModuleList", Sharding.ANY, Vectors)
class InModuleList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = NUM_HEADS
        self.inputs = nn.ModuleList(nn.Linear(D_MODEL, D_MODEL) for _ in range(3))
        self.output = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in self.inputs)
        return self.output(merge_heads(attend(q, k, v)))


@cases.add("a weight read without calling its layer", Sharding.ANY)
class ReadsWeight(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.wq.weight), self.wk(x), self.wv(x)
        q, k, v = (split_heads(each, self.n_heads) for each in (q, k, v))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.variant("the output layer's weight read without calling it", Sharding.ANY, bias=True)
class ReadsOutputWeight(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return F.linear(merge_heads(attend(q, k, v)), self.wo.weight, self.wo.bias)


@cases.variant("the weights of keys and values joined in the forward", Sharding.ANY)
class JoinsWeights(Separate):
    def forward(self, x: Tensor) -> Tensor:
        keys_and_values = F.linear(x, torch.cat((self.wk.weight, self.wv.weight)))
        q, k, v = (split_heads(each, self.n_heads) for each in (self.wq(x), *keys_and_values.chunk(2, dim=-1)))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("weights tied between queries and keys", Sharding.ANY)
class TiedQueryAndKey(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.wk.weight = self.wq.weight

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("one layer called for queries and keys", Sharding.SHARDS)
class OneLayerTwice(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wq(x.flip(-1)) + self.wk(x), self.wv(x)
        q, k, v = (split_heads(each, self.n_heads) for each in (q, k, v))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.variant("one layer's output used as keys and as values", Sharding.SHARDS)
class KeysAreValues(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, k) + attend(k, q, v)))


@cases.add("LoRA added to the queries", Sharding.SHARDS, Module)
class LoraQuery(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(D_MODEL, 3, bias=False), nn.Linear(3, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x) + 2 * self.lora_b(self.lora_a(x))
        q, k, v = (split_heads(each, self.n_heads) for each in (q, self.wk(x), self.wv(x)))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("fused: chunk(3)", Sharding.SHARDS)
class FusedChunks(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(each, self.num_heads) for each in self.qkv(x).chunk(3, dim=-1))
        return self.proj(merge_heads(attend(q, k, v)))


@cases.variant("fused: [3, h, d], permuted", Sharding.SHARDS, Vectors, bias=False)
class FusedPermuted(Fused):
    def forward(self, x: Tensor) -> Tensor:
        b, t, dim = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(merge_heads(attend(q, k, v)))


@cases.add("fused: [h, 3, d] as GPT-NeoX", Sharding.SHARDS, Vectors)
class FusedNeoX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.head_size = NUM_HEADS, HEAD_DIM
        self.query_key_value, self.dense = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, hidden_states: Tensor) -> Tensor:
        fused = self.query_key_value(hidden_states)
        fused = fused.view(*fused.shape[:2], self.num_attention_heads, 3 * self.head_size).transpose(1, 2)
        q, k, v = fused.chunk(3, dim=-1)
        return self.dense(merge_heads(attend(q, k, v)))


@cases.variant("fused: [h, 3, d] as Bloom", Sharding.SHARDS)
class FusedBloom(FusedNeoX):
    def forward(self, hidden_states: Tensor) -> Tensor:
        fused = self.query_key_value(hidden_states)
        fused = fused.view(*fused.shape[:2], self.num_attention_heads, 3, self.head_size)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        return self.dense(merge_heads(attend(q, k, v)))


@cases.add("fused: Conv1D as GPT-2", Sharding.SHARDS)
class FusedConv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = NUM_HEADS
        self.c_attn, self.c_proj = (Conv1D(n * D_MODEL, D_MODEL, torch.float64) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(each, self.n_head) for each in self.c_attn(x).split(D_MODEL, dim=2))
        return self.c_proj(merge_heads(attend(q, k, v)))


@cases.add("fused: keys and values in wkv", Sharding.ANY)
class FusedKeyValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = NUM_HEADS
        self.wq, self.wkv = nn.Linear(D_MODEL, D_MODEL, bias=False), nn.Linear(D_MODEL, 2 * D_MODEL, bias=False)
        self.wo = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(each, self.n_heads) for each in (self.wq(x), *self.wkv(x).chunk(2, dim=-1)))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.variant("fused: one parameter without a layer", Sharding.ANY)
class FusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = NUM_HEADS
        self.qkv_weight = nn.Parameter(torch.randn(3 * D_MODEL, D_MODEL) * 0.1)
        self.qkv_bias = nn.Parameter(torch.zeros(3 * D_MODEL))
        self.proj = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        fused = F.linear(x, self.qkv_weight, self.qkv_bias)
        q, k, v = (split_heads(each, self.num_heads) for each in fused.chunk(3, dim=-1))
        return self.proj(merge_heads(attend(q, k, v)))


@cases.add("x gates the output", Sharding.SHARDS, Vectors)
class GatedByInput(HuggingFace):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(merge_heads(attend(q, k, v)) * torch.sigmoid(x))
