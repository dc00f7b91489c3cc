"""column_row_mlp's backward is a chain: each weight's gradient is complete before the next one is computed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from support.ranks import on_ranks


def _weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"w1": torch.randn(6, 4), "w3": torch.randn(6, 4), "w2": torch.randn(4, 6)}


# "begins": the node that computes a weight's gradient runs. "complete": the weight's leaf has its gradient.
ORDER = ["w2 complete", "w3 begins", "w3 complete", "w1 begins", "w1 complete"]


def _backward_events(
    leaves: dict[str, Tensor], weights: dict[str, Tensor], group_name: str, recompute: bool = False
) -> list[str]:
    """Run forward and backward with `weights`, derived from `leaves`; return the events in order."""
    x = torch.randn(3, 4, requires_grad=True)
    events: list[str] = []
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: events.append(f"{name} complete"))
    y = _forward(x, weights, group_name, recompute)
    _, (h1, _), _, (h3, _) = y.grad_fn.next_functions  # the inputs of the last node: x, h1, w2, h3
    h1.register_prehook(lambda _: events.append("w1 begins"))
    h3.register_prehook(lambda _: events.append("w3 begins"))
    y.square().sum().backward()
    assert x.grad is not None
    return events


def _forward(x: Tensor, weights: dict[str, Tensor], group_name: str, recompute: bool) -> Tensor:
    return weft.ops.column_row_mlp(
        x, weights["w1"], weights["w2"], weights["w3"], activation="silu", group_name=group_name, recompute=recompute
    )


def _run(x: Tensor, weights: dict[str, Tensor], group_name: str) -> None:
    _forward(x, weights, group_name, False).square().sum().backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_plain_weights_are_in_order(world_size: int, recompute: bool) -> None:
    leaves = {name: w.requires_grad_() for name, w in _weights().items()}
    assert _backward_events(leaves, leaves, dist.group.WORLD.group_name, recompute) == ORDER


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("order", [("w1", "w2", "w3"), ("w2", "w3", "w1"), ("w3", "w1", "w2")])
def test_gradients_of_earlier_views_are_in_order(order: tuple[str, ...], depth: int) -> None:
    """DTensor.to_local and casts create such views; their autograd nodes are older than the operator's."""
    leaves = {name: w.requires_grad_() for name, w in _weights().items()}
    views = {name: leaves[name] for name in order}
    for _ in range(depth):
        views = {name: view.view_as(view) for name, view in views.items()}
    assert _backward_events(leaves, views, "") == ORDER


@on_ranks(2)
def test_step_in_hook_matches_step_after_backward(rank: int) -> None:
    """A hook may step a weight and drop its gradient as soon as the gradient is complete."""
    group, x = dist.group.WORLD.group_name, torch.ones(3, 4)
    expected = {name: w.clone().requires_grad_() for name, w in _weights().items()}
    x_plain = x.clone().requires_grad_()
    _run(x_plain, expected, group)

    leaves = {name: w.requires_grad_() for name, w in _weights().items()}
    alive: list[int] = []

    def step(leaf: Tensor) -> None:
        alive.append(sum(t.grad is not None for t in leaves.values()))
        with torch.no_grad():
            leaf -= 0.1 * leaf.grad
        leaf.grad = None

    for leaf in leaves.values():
        leaf.register_post_accumulate_grad_hook(step)
    hooked_x = x.clone().requires_grad_()
    _run(hooked_x, leaves, group)
    assert alive == [1, 1, 1]
    assert torch.equal(hooked_x.grad, x_plain.grad)
    for name, start in _weights().items():
        assert torch.equal(leaves[name], start - 0.1 * expected[name].grad)


@pytest.mark.parametrize(("gated", "recompute"), [(True, False), (False, False), (True, True)])
def test_saves_only_x_and_hidden_values(gated: bool, recompute: bool) -> None:
    leaves = {name: w.requires_grad_() for name, w in _weights().items()}
    x = torch.randn(7, 4, requires_grad=True)
    weights = {t.data_ptr() for t in leaves.values()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        weft.ops.column_row_mlp(
            x,
            leaves["w1"],
            leaves["w2"],
            leaves["w3"] if gated else None,
            activation="silu",
            group_name="",
            recompute=recompute,
        )
    x_numel, h_numel = 7 * 4, 7 * 6
    hidden = [] if recompute else [h_numel] * (2 if gated else 1)
    assert saved.pop(x.data_ptr()) == x_numel
    assert sorted(saved.values()) == hidden


def test_partial_and_repeated_backwards_agree() -> None:
    leaves = {name: w.requires_grad_() for name, w in _weights().items()}
    x = torch.randn(3, 4, requires_grad=True)
    y = weft.ops.column_row_mlp(x, leaves["w1"], leaves["w2"], leaves["w3"], activation="gelu", group_name="").sum()
    gradients = torch.autograd.grad(y, [x, *leaves.values()], retain_graph=True)
    again = torch.autograd.grad(y, [x, *leaves.values()], retain_graph=True)
    for index, leaf in enumerate([x, *leaves.values()]):
        (gradient,) = torch.autograd.grad(y, [leaf], retain_graph=True)
        assert torch.equal(gradient, gradients[index]) and torch.equal(again[index], gradients[index])
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
