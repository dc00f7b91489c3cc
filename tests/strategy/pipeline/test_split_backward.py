"""Compares the two halves of a split backward with the full backward: gradients, and the work of each half."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from support.ranks import on_ranks
from weft.strategy.pipeline.backward import backward, backward_input, edge_of


class Counts(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Shared(nn.Module):
    """Calls a norm and a layer twice, also reads the layer's weight directly, and has an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.norm(self.layer(torch.tanh(self.norm(self.layer(x)))) + y)
        weight = self.layer.weight.t()
        return (z @ weight @ weight) * self.scale, self.scale.exp()


class Entangled(nn.Module):
    """The path from input to output uses a weight, and a factor that is computed from the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * self.scale.exp()


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )


MODELS = {
    "chain": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), [(3, 4)]),
    "shared": (Shared, [(3, 4), (3, 4)]),
    "entangled": (Entangled, [(3, 4)]),
    "recurrent": (lambda: nn.GRU(4, 3, batch_first=True), [(2, 5, 4)]),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), [(2, 3, 8)]),
    "convolutions": (convolutions, [(2, 1, 4, 4)]),
    "checkpointed": (lambda: Checkpointed(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), [(3, 4)]),
    "frozen": (lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)), [(3, 4)]),
    "all frozen": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False), [(3, 4)]),
}
# Their backward is not split: a factor is computed from a weight, or all steps of a loop use one copy of a weight.
UNSPLIT = ("entangled", "recurrent")


def run(name: str, *, halves: bool, inputs_need_gradients: bool = True) -> tuple[list[Tensor | None], Counts, Counts]:
    """Return all gradients, inputs first, and the operator counts of both halves; a full backward is in the first."""
    make, shapes = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=inputs_need_gradients) for shape in shapes]
    outputs = model(*inputs)
    tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    seeds = [torch.randn_like(tensor) for tensor in tensors]
    edges = [edge_of(tensor) for tensor in tensors]
    first, second = Counts(), Counts()
    if not halves:
        with first:
            backward(edges, seeds)
        found = [tensor.grad for tensor in inputs]
    else:
        leaves = inputs if inputs_need_gradients else []
        with first:
            found, rest = backward_input(edges, seeds, leaves)
        is_unsplit = name in UNSPLIT and inputs_need_gradients
        assert all(p.grad is None for p in model.parameters()) == (not is_unsplit)
        with second:
            rest.run()
        found = found if inputs_need_gradients else [None] * len(inputs)
    return [*found, *(parameter.grad for parameter in model.parameters())], first, second


@pytest.mark.parametrize("inputs_need_gradients", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_halves_match_full_backward(name, inputs_need_gradients):
    if name == "all frozen" and not inputs_need_gradients:
        pytest.skip("nothing needs a gradient")
    full, _, _ = run(name, halves=False, inputs_need_gradients=inputs_need_gradients)
    halves, _, _ = run(name, halves=True, inputs_need_gradients=inputs_need_gradients)
    assert len(full) == len(halves)
    for expected, found in zip(full, halves, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_halves_share_no_work():
    _, full, _ = run("chain", halves=False)
    _, first, second = run("chain", halves=True)
    assert full.calls["mm"] == 4
    assert (first.calls["mm"], second.calls["mm"]) == (2, 2)


def test_stage_without_inputs_runs_in_second_half():
    _, first, second = run("chain", halves=True, inputs_need_gradients=False)
    assert first.calls["mm"] == 0 and second.calls["mm"] == 3


@on_ranks(2)
def test_weft_operators_are_split() -> None:
    """Separate autograd nodes compute the weights' gradients; the first half communicates."""
    group_name = dist.group.WORLD.group_name
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 4), (4, 6), (6, 4))]

    def forward() -> Tensor:
        return weft.ops.column_row_mlp(x, *weights, activation="silu", group_name=group_name)

    y = forward()
    seed = torch.randn_like(y)
    expected = torch.autograd.grad(forward(), [x, *weights], seed)
    first, second = Counts(), Counts()
    with first:
        [found], rest = backward_input([edge_of(y)], [seed], [x])
    assert all(weight.grad is None for weight in weights)
    with second:
        rest.run()
    for one, other in zip([found, *(weight.grad for weight in weights)], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert (first.calls["reduce_from_group"], second.calls["reduce_from_group"]) == (1, 0)
    # The gradients of three layers are six products; both halves compute the one of the hidden values.
    assert (first.calls["mm"] + first.calls["addmm_"], second.calls["mm"]) == (3, 4)
