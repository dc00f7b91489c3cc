"""Checkpoints inside of `keeping_recomputed`: gradients, random numbers, the number of recomputations, freed memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from strategy.pipeline.test_split_backward import Counts
from torch import Tensor, nn

from weft.strategy import checkpoint_activations
from weft.strategy.modules.kept_recomputation import checkpoint, keeping_recomputed
from weft.strategy.pipeline.backward import backward_input, edge_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return (x + self.down(self.drop(torch.relu(self.up(x))))) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=x.mean())
        return x


def gradients(what: list[Any], *, halves: bool, dtype: torch.dtype) -> tuple[list[Tensor | None], Counts, Counts]:
    """Return the gradients of the input and the parameters, and the operators of both halves of the backward.

    `what`: checkpoints, the inner ones first. A model in float32 runs under autocast.
    """
    torch.manual_seed(0)
    model = Model().to(dtype)
    for each in what:
        checkpoint_activations(model, each)
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    with keeping_recomputed(halves), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        y = model(x)
    seed = torch.randn_like(y)
    first, second = Counts(), Counts()
    if halves:
        with first:
            found, rest = backward_input([edge_of(y)], [seed], [x])
        assert all(parameter.grad is None for parameter in model.parameters())
        with second:
            rest.run()
    else:
        y.backward(seed)
        found = [x.grad]
    return [*found, *(parameter.grad for parameter in model.parameters())], first, second


CHECKPOINTS: dict[str, list[Any]] = {
    "full": ["full"],
    "selective": ["selective"],
    "nested": [{"blocks.0.up": "full", "blocks.1.drop": "full"}, {"blocks.*": "full"}],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_halves_match_full_backward(name: str, dtype: torch.dtype) -> None:
    expected, _, _ = gradients([], halves=False, dtype=dtype)
    found, _, _ = gradients(CHECKPOINTS[name], halves=True, dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["full", "nested"])
def test_each_block_is_recomputed_once(name: str) -> None:
    _, first, second = gradients([], halves=True, dtype=torch.float64)
    assert (first.calls["addmm"], second.calls["addmm"]) == (0, 0)
    assert (first.calls["mm"], second.calls["mm"]) == (4, 4)
    _, first, second = gradients(CHECKPOINTS[name], halves=True, dtype=torch.float64)
    assert (first.calls["addmm"], second.calls["addmm"]) == (4, 0)
    assert (first.calls["mm"], second.calls["mm"]) == (4, 4)


def test_activations_exist_from_the_first_half_to_the_end_of_the_graph() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = torch.exp(x * weight)
        seen.append(weakref.ref(hidden.untyped_storage()))
        return torch.exp(hidden)

    x, weight = (torch.randn(5, requires_grad=True) for _ in range(2))
    with keeping_recomputed():
        y = checkpoint(forward, x, weight)
    assert [each() is None for each in seen] == [True]
    [gradient], rest = backward_input([edge_of(y)], [torch.ones_like(y)], [x])
    del y
    assert [each() is None for each in seen] == [True, False]
    rest.run()
    del rest
    assert [each() is None for each in seen] == [True, True]
    torch.testing.assert_close(gradient * x, weight.grad * weight)


def test_other_recomputation_raises() -> None:
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(0)
        return torch.exp(torch.exp(x) if len(calls) == 1 else x.sum())

    x = torch.randn(5, requires_grad=True)
    with keeping_recomputed():
        y = checkpoint(forward, x)
    with pytest.raises(RuntimeError, match="the recomputed forward saved 1 tensors"):
        y.sum().backward()
