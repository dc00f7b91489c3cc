"""The outputs and logs of steps for micro-batches are joined into one value."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from support.ranks import on_ranks
from weft._plugin.step_outputs import broadcast_serialized, join_outputs, serialize, weighted_mean

SIZES, WEIGHTS = [2, 1], [2.0, 1.0]


class Named(NamedTuple):
    loss: torch.Tensor
    guess: torch.Tensor


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([None, None], None),
        ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
        ([1, 4], 2.0),
        ([3, 3], 3),
        ([16777217, 16777219.0], 16777217 + 2 / 3),
        ([torch.tensor([1.0]), torch.tensor([4.0])], torch.tensor([2.0])),
        ([torch.zeros(2, 3), torch.ones(1, 3)], torch.cat([torch.zeros(2, 3), torch.ones(1, 3)])),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([("a", 1.0), ("a", 4.0)], ("a", 2.0)),
        ([True, True], True),
        ([{"x": torch.zeros(2)}, {"x": torch.ones(1)}], {"x": torch.tensor([0.0, 0.0, 1.0])}),
        (
            [Named(torch.tensor(1.0), torch.tensor([1, 2])), Named(torch.tensor(4.0), torch.tensor([3]))],
            Named(torch.tensor(2.0), torch.tensor([1, 2, 3])),
        ),
        ([[torch.zeros(2), "a", 0.0], [torch.ones(1), "a", 3.0]], [torch.tensor([0.0, 0.0, 1.0]), "a", 1.0]),
    ],
)
def test_outputs_of_micro_batches_are_joined(outputs: list[Any], expected: Any) -> None:
    assert is_equal(join_outputs(outputs, SIZES, WEIGHTS), expected)


def test_equal_lists_of_samples_are_concatenated() -> None:
    assert join_outputs([["cat"], ["cat"]], [1, 1], [1.0, 1.0]) == ["cat", "cat"]
    assert join_outputs([["cat"], ["cat"]], SIZES, WEIGHTS) == ["cat"]


def is_equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    return left == right


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.zeros(3, 2), torch.zeros(3, 1)],
        [{"a": 1}, {"b": 1}],
        ["a", "b"],
        [("a",), ("a", "b")],
        [True, False],
        [object(), object()],
    ],
)
def test_unjoinable_outputs_raise(outputs: list[Any]) -> None:
    with pytest.raises(TypeError, match="for each micro-batch, which cannot be joined; return tensors with the"):
        join_outputs(outputs, SIZES, WEIGHTS)


def test_one_micro_batch_is_returned_unchanged() -> None:
    output = object()
    assert join_outputs([output], [3], [3.0]) is output


def test_mean_ignores_zero_weights() -> None:
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    assert weighted_mean([nan, torch.tensor(2.0)], [0.0, 1.0]).item() == 2
    assert weighted_mean([nan, nan], [0.0, 0.0]).isnan()
    assert weighted_mean([torch.tensor([3]), torch.tensor([4])], [1.0, 1.0]).item() == 3.5
    assert weighted_mean([nan, torch.tensor(2.0)], [0.0, 1.0]).dtype == torch.float64


def test_unpicklable_outputs_raise() -> None:
    with pytest.raises(
        TypeError, match=r"a step returned or logged a value that cannot be sent to other stages \(.*; use tensors"
    ):
        serialize({"f": lambda: None})


@on_ranks(2)
def test_outputs_come_from_last_rank(rank: int, world_size: int) -> None:
    large = torch.arange(9000.0).view(3, 3000)
    view = large[1]  # a small view of a large tensor
    sent = {"large": large, "view": view[:2], "text": ["a", None], "number": torch.tensor(3)}
    group = torch.distributed.group.WORLD
    received = broadcast_serialized(serialize(sent) if rank == 1 else None, group, 1, torch.device("cpu"))
    assert torch.equal(received["large"], large) and torch.equal(received["view"], view[:2])
    assert received["text"] == ["a", None] and received["number"] == 3
