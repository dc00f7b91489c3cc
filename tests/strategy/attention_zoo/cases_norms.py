"""Norms of queries, keys and outputs, with weights and without, and values mixed with other tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    merge_heads,
    split_heads,
)
from torch import Tensor, nn

cases = Cases()


@cases.add("output: LayerNorm over all features", Sharding.SHARDS)
class OutputLayerNorm(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(self.norm(merge_heads(attend(q, k, v))))


@cases.variant("output: norm over all features without weights", Sharding.SHARDS, Vectors)
class OutputPlainNorm(HuggingFace):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        features = merge_heads(attend(q, k, v))
        return self.o_proj(F.layer_norm(features, features.shape[-1:]))


@cases.add("output: RMSNorm of each head", Sharding.SHARDS)
class OutputHeadRms(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.head_norm = nn.RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(self.head_norm(attend(q, k, v))))


@cases.add("output: GroupNorm of each head", Sharding.SHARDS, Module)
class OutputGroupNorm(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(NUM_HEADS, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        features = self.group_norm(merge_heads(attend(q, k, v)).flatten(0, 1))
        return self.wo(features.view(*x.shape[:2], -1))


@cases.variant("output: four groups without weights", Sharding.SHARDS)
class OutputFourGroups(Separate):
    """Four groups of three heads; half of the heads also divide into four groups, but of other features."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        features = F.group_norm(merge_heads(attend(q, k, v)).flatten(0, 1), 4)
        return self.wo(features.view(*x.shape[:2], -1))


@cases.add("output: BatchNorm", Sharding.SHARDS)
class OutputBatchNorm(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        features = self.batch_norm(merge_heads(attend(q, k, v)).flatten(0, 1))
        return self.wo(features.view(*x.shape[:2], -1))


@cases.variant("output: BatchNorm of head features without weights", Sharding.SHARDS, Vectors)
class OutputPlainBatchNorm(HuggingFace):
    """Its statistics are over all heads; training updates them in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HEAD_DIM, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads = attend(q, k, v).transpose(1, 2)
        return self.o_proj(self.batch_norm(heads.flatten(0, 2)).view(heads.shape).flatten(2))


class _QueryAndKey(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(self.wq(x)), self.k_norm(self.wk(x))
        q, k, v = (split_heads(each, self.n_heads) for each in (q, k, self.wv(x)))
        return self.wo(merge_heads(attend(q, k, v)))


@cases.add("QK norm over all heads", Sharding.SHARDS)
class NormOfAllHeads(_QueryAndKey):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D_MODEL), nn.LayerNorm(D_MODEL)


@cases.add("QK norm over all heads without weights", Sharding.SHARDS)
class PlainNormOfAllHeads(_QueryAndKey):
    def q_norm(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1)

    k_norm = q_norm


@cases.add("QK norm of each head", Sharding.HEADS)
class NormOfHead(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(self.q_norm(q), self.k_norm(k), v)))


@cases.add("QK norm of each head without weights", Sharding.HEADS, Vectors)
class PlainNormOfHead(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        return self.o_proj(merge_heads(attend(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)))


@cases.variant("QK norm of each head, other weights for each", Sharding.SHARDS)
class NormWithWeightsOfHead(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.Parameter(torch.ones(NUM_HEADS, 1, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(F.normalize(q, dim=-1) * self.q_norm, k, v)))


@cases.variant("keys divided by their largest feature", Sharding.SHARDS)
class ScaledKeys(Separate):
    def forward(self, x: Tensor) -> Tensor:
        k = self.wk(x)
        k = k / (1 + k.abs().amax(dim=-1, keepdim=True))
        q, k, v = (split_heads(each, self.n_heads) for each in (self.wq(x), k, self.wv(x)))
        return self.wo(merge_heads(attend(q, k, v)))


class _ValueBlock(Block):
    def forward(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        y, value = self.attn(self.norm1(x), value)
        x = x + y
        return x + self.mlp(self.norm2(x)), value


class _ValueModel(Tokens):
    def __init__(self, attention: object) -> None:
        super().__init__(attention, _ValueBlock)

    def forward(self, ids: Tensor) -> Tensor:
        x, value = self.embedding(ids), None
        for block in self.blocks:
            x, value = block(x, value)
        return self.head(self.norm(x))


@cases.add("values mixed with the first block's", Sharding.ANY, _ValueModel)
class ValueResidual(Separate):
    def forward(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        mixed = v if value is None else 0.6 * v + 0.4 * value
        return self.wo(merge_heads(attend(q, k, mixed))), v if value is None else value


@cases.variant("values mixed with the input", Sharding.SHARDS)
class ValueWithInput(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x) + 0.5 * x
        q, k, v = (split_heads(each, self.n_heads) for each in (q, k, v))
        return self.wo(merge_heads(attend(q, k, v)))
