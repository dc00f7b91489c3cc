"""Layers of a verified group, called outside of the forward that was verified, accept and return full tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from support.parity import full, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import report


class Mlp(nn.Module):
    """Fused by plan="auto"; `hidden` and `other` call its layers outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))

    def hidden(self, x: Tensor) -> Tensor:
        return F.normalize(F.gelu(self.fc1(x)), dim=-1)

    def other(self, x: Tensor) -> Tensor:
        return self.fc2(F.softmax(self.fc1(x), dim=-1))


class Clamped(Mlp):
    """Sharded by column and row."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).clamp(-1, 1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)

    def hidden(self, x: Tensor) -> Tensor:
        return self.heads(self.query(x)).mean(1)

    def other(self, x: Tensor) -> Tensor:
        return self.out(self.value(x).softmax(-1))


class CheckpointedAttention(Attention):
    """Verification cannot compare it, so its activations are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False)


class CheckpointedMlp(Clamped):
    """Sharded by column and row; the backward recomputes its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "forward": lambda model, x: model(x).square().mean(),
    "method": lambda model, x: model(x).square().mean() + model.inner.hidden(x).square().mean(),
    "methods": lambda model, x: model.inner.hidden(x).sum() + model.inner.other(x).square().mean(),
    "layer": lambda model, x: next(model.inner.children())(x).logsumexp(-1).mean() + model(x).mean(),
}


@on_ranks(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("module", [Mlp, Clamped, CheckpointedMlp, Attention, CheckpointedAttention])
def test_code_outside_gets_full_tensors(world_size: int, module: type[nn.Module], loss: str) -> None:
    torch.manual_seed(0)
    model = Model(module()).double()
    reference, x = copy.deepcopy(model), torch.randn(2, 5, 8, dtype=torch.float64)
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    if module in (Clamped, CheckpointedMlp):
        assert report(model).rows[0].style == "column"
    assert all(p.to_local().shape != p.shape for name, p in model.named_parameters() if name.endswith("weight"))
    for each in (model, copy.deepcopy(model)):
        actual, expected = LOSSES[loss](each, x), LOSSES[loss](reference, x)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
        for one in (each, reference):
            one.zero_grad()
        actual.backward()
        expected.backward()
        for parameter, own in zip(each.parameters(), reference.parameters(), strict=True):
            gradient = None if parameter.grad is None else full(parameter.grad)
            actual, expected = (torch.zeros_like(own) if g is None else g for g in (gradient, own.grad))
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


@on_ranks(2)
def test_explicit_rules_exchange_shards_anywhere(world_size: int) -> None:
    """The user's own code may pass shards between layers that no module calls together."""
    model = Model(Mlp()).double()
    weft.parallelize(model, tensor_parallel(world_size), {"inner.fc1": "column", "inner.fc2": "row"})
    assert model.inner.fc1(torch.zeros(3, 8, dtype=torch.float64)).shape == (3, 6)
