"""A mixture of experts on sharded ranks, and its unsharded reference: a loop over tokens and experts in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import weft

# Tokens of each rank; the first `world_size` are used.
TOKENS = (5, 0, 7, 2)


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer, and the experts that a token may choose."""

    num_experts: int
    top_k: int
    features: int = 6
    hidden: int = 4
    chosen: tuple[int, ...] | None = None  # None: all


# Uneven shards, experts without tokens, ranks without experts, one expert, one expert for all tokens.
LAYERS = (
    Layer(8, 2),
    Layer(5, 3),
    Layer(6, 2, chosen=(0, 5)),
    Layer(3, 1),
    Layer(1, 1),
    Layer(9, 1, chosen=(4,)),
)


def linear_of_experts(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return grouped_linear's result, row by row."""
    rows, begin = [], 0
    for expert, count in enumerate(counts.tolist()):
        for row in x[begin : begin + count]:
            y = weight[expert] @ row
            rows.append(y if bias is None else y + bias[expert])
        begin += count
    return torch.stack(rows) if rows else x.new_zeros(0, weight.size(1)) + 0 * (x.sum() + weight.sum())


class Parameters:
    """The parameters of an unsharded layer in float64, equal on all ranks, as leaves."""

    def __init__(self, layer: Layer) -> None:
        torch.manual_seed(layer.num_experts)
        shape = layer.num_experts, layer.hidden, layer.features
        self.values = {
            "router": torch.randn(layer.num_experts, layer.features),
            "gate": torch.randn(shape),
            "up": torch.randn(shape),
            "down": torch.randn(layer.num_experts, layer.features, layer.hidden),
        }
        self.values = {name: value.double().requires_grad_() for name, value in self.values.items()}

    def on_rank(self, world_size: int, rank: int) -> dict[str, Tensor]:
        """Return a rank's parameters as leaves: the full router, and its shard of the experts."""

        def shard(name: str, value: Tensor) -> Tensor:
            start, length = weft.nn.shard.shard_range(len(value), world_size, rank)
            return value if name == "router" else value.narrow(0, start, length)

        return {name: shard(name, value).detach().clone().requires_grad_() for name, value in self.values.items()}


def tokens_of(layer: Layer, world_size: int) -> list[Tensor]:
    """Return the tokens of each rank in float64, as leaves."""
    torch.manual_seed(7)
    return [torch.randn(number, layer.features).double().requires_grad_() for number in TOKENS[:world_size]]


def logits_of(x: Tensor, router: Tensor, layer: Layer) -> Tensor:
    """Return the router's logits, low for the experts that must not be chosen."""
    logits = x @ router.t()
    if layer.chosen is None:
        return logits
    penalty = torch.full_like(logits, 100.0)
    penalty[:, list(layer.chosen)] = 0
    return logits - penalty


def moe(x: Tensor, own: dict[str, Tensor], layer: Layer, group_name: str) -> Tensor:
    """Return the layer's result for this rank's tokens, by weft's operators."""
    weights, expert_ids = weft.ops.route(logits_of(x, own["router"], layer), layer.top_k)
    rows, counts, *routes = weft.ops.moe_dispatch(x, expert_ids, num_experts=layer.num_experts, group_name=group_name)
    gate, up = (weft.ops.grouped_linear(rows, own[name], counts) for name in ("gate", "up"))
    rows = weft.ops.grouped_linear(F.silu(gate) * up, own["down"], counts)
    return weft.ops.moe_combine(rows, weights, *routes, group_name=group_name)


def moe_reference(x: Tensor, full: dict[str, Tensor], layer: Layer) -> Tensor:
    """Return the layer's result for all tokens, by a loop over tokens and experts."""
    results = []
    for token, logits in zip(x, logits_of(x, full["router"], layer), strict=True):
        scores = logits.softmax(-1)
        chosen = sorted(range(layer.num_experts), key=lambda expert: (-scores[expert].item(), expert))[: layer.top_k]
        y = torch.zeros_like(token)
        for expert in chosen:
            hidden = F.silu(full["gate"][expert] @ token) * (full["up"][expert] @ token)
            y = y + scores[expert] / scores[chosen].sum() * (full["down"][expert] @ hidden)
        results.append(y)
    return torch.stack(results) if results else x * 0


def group() -> str:
    return dist.group.WORLD.group_name


def check_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape, f"{what} of shape {list(actual.shape)}, expected {list(expected.shape)}"
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max().item()
        assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{what} is off by {error:.2e}"
