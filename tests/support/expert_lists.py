"""Tiny language models with experts in an nn.ModuleList, as in transformers 4 and in hand-written layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 32, 24, 7, 2
DEAD = 6  # an expert that no token is routed to


class GatedMlp(nn.Module):
    """As transformers 4's MixtralBlockSparseTop2MLP."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, INNER, bias=False)
        self.w2 = nn.Linear(INNER, hidden, bias=False)
        self.w3 = nn.Linear(hidden, INNER, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class MixtralBlock(nn.Module):
    """As transformers 4's MixtralSparseMoeBlock: calls the experts that got tokens, and adds in place."""

    def __init__(self, jitter: float = 0.0) -> None:
        super().__init__()
        self.jitter = jitter
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([GatedMlp() for _ in range(NUM_EXPERTS)])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        shape = hidden_states.shape
        if self.training and self.jitter > 0:
            hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        hidden_states = hidden_states.view(-1, HIDDEN)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(_without_dead(router_logits), dim=1)
        routing_weights, selected_experts = torch.topk(routing_weights, TOP_K, dim=-1)
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        final_hidden_states = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected_experts, num_classes=NUM_EXPERTS).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, HIDDEN)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final_hidden_states.reshape(shape), router_logits


class MaskedBlock(nn.Module):
    """Hand-written: masks, results changed in place, biases, a shared expert, and a count of the tokens."""

    seen: Tensor

    def __init__(self, jitter: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN)) for _ in range(NUM_EXPERTS)
        )
        self.shared_experts = nn.ModuleList([GatedMlp()])
        self.register_buffer("seen", torch.zeros(NUM_EXPERTS))
        self.num_calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, ids = torch.sigmoid(_without_dead(logits)).topk(TOP_K, dim=-1)
        self.seen += torch.bincount(ids.flatten(), minlength=NUM_EXPERTS)
        self.num_calls += 1
        result = self.shared_experts[0](x)
        for i, expert in enumerate(self.experts):
            chosen = ids == i
            rows = chosen.any(-1)
            current = expert(x[rows])
            current *= (weights * chosen).sum(-1)[rows].unsqueeze(-1)
            result = result.index_put((rows,), current, accumulate=True)
        return result, logits


class DenseBlock(nn.Module):
    """Hand-written: each expert computes all tokens, and an einsum with the gates weights them."""

    def __init__(self, jitter: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN) / HIDDEN**0.5)
        self.experts = nn.ModuleList(GatedMlp() for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.einsum("bth,eh->bte", x, self.gate)
        results = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return torch.einsum("bte,bteh->bth", F.softmax(logits, dim=-1), results), logits


class ExpertList(nn.ModuleList):
    """As transformers 4.5x's Qwen2MoeExperts: the list itself calls its experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        mask = F.one_hot(top_k_index, num_classes=NUM_EXPERTS).permute(2, 1, 0)
        for idx in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            position, token = torch.where(mask[idx].squeeze(0))
            current = self[idx](hidden_states[None, token].reshape(-1, HIDDEN))
            result.index_add_(0, token, current * top_k_weights[token, position, None])
        return result


class ListBlock(nn.Module):
    def __init__(self, jitter: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = ExpertList([GatedMlp() for _ in range(NUM_EXPERTS)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.view(-1, HIDDEN)
        logits = self.gate(tokens)
        weights, ids = F.softmax(_without_dead(logits), dim=-1).topk(TOP_K, dim=-1)
        return self.experts(tokens, ids, weights).view(x.shape), logits


BLOCKS: dict[str, type[nn.Module]] = {
    "mixtral": MixtralBlock,
    "masked": MaskedBlock,
    "dense": DenseBlock,
    "list": ListBlock,
}


def _without_dead(logits: Tensor) -> Tensor:
    dead = torch.arange(NUM_EXPERTS, device=logits.device) == DEAD
    return logits.masked_fill(dead, -1e9)


class Layer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x))[0]
        return result


class ListModel(nn.Module):
    """A language model with two layers of experts; it has no attention: each token predicts the next one."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(BLOCKS[kind](**options)) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def list_model(kind: str, **options: Any) -> ListModel:
    """Return a model in float64."""
    return ListModel(kind, **options).to(torch.float64)
