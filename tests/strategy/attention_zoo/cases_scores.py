"""Scores, weights and outputs: kernels, dropout, temperatures, gates, and weights that other code reads."""

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
    causal_mask,
    causal_weights,
    merge_heads,
    split_heads,
)
from torch import Tensor, nn

cases = Cases()


@cases.add("SDPA: a bool mask", Sharding.HEADS, mask="bool")
@cases.variant("SDPA: a float mask and a scale", Sharding.HEADS, Module, mask="float", scale=0.3)
@cases.add("SDPA: is_causal and dropout_p=0.0", Sharding.HEADS, is_causal=True, dropout_p=0.0)
class Kernel(Separate):
    def __init__(self, mask: str = "", **options: object) -> None:
        super().__init__()
        self.mask, self.options = mask, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        mask = causal_mask(x.shape[1]) if self.mask else None
        if self.mask == "float":
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        return self.wo(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)))


@cases.add("SDPA: dropout", Sharding.SHARDS, Vectors)
class KernelDropout(HuggingFace):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        p = 0.1 if self.training else 0.0
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, dropout_p=p)))


@cases.add("einsum", Sharding.HEADS)
class Einsum(Separate):
    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.n_heads, self.head_dim)
        q, k, v = (layer(x).view(shape) for layer in (self.wq, self.wk, self.wv))
        weights = causal_weights(torch.einsum("bthd,bshd->bhts", q, k) / 2)
        return self.wo(torch.einsum("bhts,bshd->bthd", weights, v).reshape(*x.shape[:2], -1))


@cases.add("weights dropped by nn.Dropout", Sharding.SHARDS)
class ModuleDropout(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(self.dropout(causal_weights(q @ k.transpose(-2, -1) / 2)) @ v))


@cases.add("weights dropped by F.dropout", Sharding.SHARDS, Vectors)
class FunctionalDropout(HuggingFace):
    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        weights = F.dropout(causal_weights(q @ k.transpose(-2, -1) / 2), p=0.1, training=self.training)
        return self.o_proj(merge_heads(weights @ v))


@cases.add("heads dropped", Sharding.SHARDS)
class HeadDropout(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        heads = attend(q, k, v)
        if self.training:
            heads = heads * (torch.rand(x.shape[0], self.n_heads, 1, 1) > 0.2)
        return self.wo(merge_heads(heads))


class _WeightsBlock(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attn(self.norm1(x))
        x = x + y
        return x + self.mlp(self.norm2(x)), weights


class _WeightsModel(Tokens):
    def __init__(self, attention: object) -> None:
        super().__init__(attention, _WeightsBlock)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x, all_weights = self.embedding(ids), []
        for block in self.blocks:
            x, weights = block(x)
            all_weights.append(weights)
        return self.head(self.norm(x)), *all_weights


@cases.add("weights returned with the output", Sharding.SHARDS, _WeightsModel)
class ReturnsWeights(Separate):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        weights = causal_weights(q @ k.transpose(-2, -1) / 2)
        return self.wo(merge_heads(weights @ v)), weights


@cases.variant("mean weights returned with the output", Sharding.SHARDS, _WeightsModel)
class ReturnsMeanWeights(Separate):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        weights = causal_weights(q @ k.transpose(-2, -1) / 2)
        return self.wo(merge_heads(weights @ v)), weights.mean(dim=1)


class _PenalizesWeights(Tokens):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(ids)
        return logits, sum(block.attn.last_weights.square().mean() for block in self.blocks)


@cases.add("weights stored, and read by the model", Sharding.ANY, _PenalizesWeights)
class KeepsWeights(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        self.last_weights = causal_weights(q @ k.transpose(-2, -1) / 2)
        return self.wo(merge_heads(self.last_weights @ v))


@cases.variant("temperature: a number", Sharding.HEADS)
@cases.variant("temperature: learned", Sharding.SHARDS, shape=())
@cases.add("temperature: learned for each head", Sharding.SHARDS, shape=(NUM_HEADS, 1, 1))
class Temperature(Separate):
    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.temperature = 0.7 if shape is None else nn.Parameter(torch.full(shape, 0.7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(causal_weights(q @ k.transpose(-2, -1) * self.temperature) @ v))


@cases.add("sinks: a learned logit for each head", Sharding.SHARDS, Vectors)
class Sinks(HuggingFace):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(NUM_HEADS))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~causal_mask(t), -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        return self.o_proj(merge_heads(torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ v))


@cases.add("talking heads", Sharding.SHARDS)
class TalkingHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(NUM_HEADS, NUM_HEADS, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        scores = self._mixed(self.before, q @ k.transpose(-2, -1) / 2)
        return self.wo(merge_heads(self._mixed(self.after, causal_weights(scores)) @ v))

    @staticmethod
    def _mixed(layer: nn.Module, heads: Tensor) -> Tensor:
        return layer(heads.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@cases.add("gates: a layer to n_heads", Sharding.SHARDS, gate="layer")
@cases.variant("gates: a parameter for each head", Sharding.SHARDS, gate="parameter")
class Gates(Separate):
    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = nn.Linear(D_MODEL, NUM_HEADS) if gate == "layer" else nn.Parameter(torch.ones(NUM_HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        gate = self.gate(x).transpose(1, 2)[..., None] if isinstance(self.gate, nn.Linear) else self.gate[:, None, None]
        return self.wo(merge_heads(attend(q, k, v) * torch.sigmoid(gate)))


@cases.add("linear attention", Sharding.HEADS)
class LinearAttention(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), self.n_heads) for layer in (self.wq, self.wk, self.wv))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        norms = q @ k.sum(dim=2, keepdim=True).transpose(-2, -1)
        return self.wo(merge_heads(q @ (k.transpose(-2, -1) @ v) / norms))


@cases.variant("keys with a softmax over all their features", Sharding.SHARDS, Vectors)
class FeatureSoftmax(HuggingFace):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_proj(x).softmax(dim=-1), self.k_proj(x).softmax(dim=1)
        q, k, v = (split_heads(each, self.num_heads) for each in (q, k, self.v_proj(x)))
        return self.o_proj(merge_heads(q @ (k.transpose(-2, -1) @ v)))


@cases.add("differential attention", Sharding.SHARDS)
class Differential(nn.Module):
    """Two softmaxes for each of NUM_HEADS / 2 heads, whose values have 2 * HEAD_DIM features."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = NUM_HEADS // 2
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.zeros(HEAD_DIM)))
        self.subln = nn.RMSNorm(2 * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (split_heads(layer(x), 2 * self.n_heads) for layer in (self.wq, self.wk))
        v = split_heads(self.wv(x), self.n_heads)
        weights = causal_weights(q @ k.transpose(-2, -1) / 2).unflatten(1, (self.n_heads, 2))
        scale = (self.lambda_q1 @ self.lambda_k1).exp() - (self.lambda_q2 @ self.lambda_k2).exp() + 0.2
        heads = (weights[:, :, 0] - scale * weights[:, :, 1]) @ v
        return self.wo(merge_heads(self.subln(heads) * 0.8))
