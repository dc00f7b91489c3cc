"""Gradients of a step that are kept until its backward: their values, and how many sets of them are alive."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from weft._plugin.kept_gradients import KeptGradients

EARLIER, COMPUTED = 5.0, 2.0


def parameters() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for parameter in found[:2]:
        parameter.grad = torch.full((3,), EARLIER)
    return found


def compute(found: list[nn.Parameter]) -> None:
    """Compute gradients; the second parameter gets none."""
    (COMPUTED * (found[0].sum() + found[2].sum())).backward()


def values(found: list[nn.Parameter]) -> list[float | None]:
    return [None if parameter.grad is None else parameter.grad[0].item() for parameter in found]


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_first_batch_gives_its_own(is_seen: bool, scale: float | None) -> None:
    found = parameters()
    earlier = weakref.ref(found[0].grad)
    kept = KeptGradients(found, is_first=True, is_seen=is_seen, scale=scale)
    with kept.computing():
        compute(found)
        assert (earlier() is None) == (not is_seen)
    loss = kept.loss_for(torch.tensor(3.0))
    # As in the Trainer: zero the gradients, then run the backward of the loss, or of the loss that it has scaled.
    assert values(found) == ([EARLIER, EARLIER, None] if is_seen else [None, None, None])
    for parameter in found:
        parameter.grad = None
    assert loss.item() == 3
    (loss if scale is not None else loss * 4).backward()
    expected = COMPUTED if scale is not None else 4 * COMPUTED
    assert values(found) == [expected, None, expected]


def test_a_later_batch_adds_at_once() -> None:
    found = parameters()
    first = found[0].grad
    kept = KeptGradients(found, is_first=False, is_seen=True, scale=0.5)
    with kept.computing():
        compute(found)
        assert found[0].grad is first
    loss = kept.loss_for(torch.tensor(3.0))
    loss.backward()
    assert values(found) == [EARLIER + COMPUTED, EARLIER, COMPUTED]


def test_a_later_batch_of_unknown_scale_waits() -> None:
    found = parameters()
    kept = KeptGradients(found, is_first=False, is_seen=False, scale=None)
    with kept.computing():
        compute(found)
    assert values(found) == [EARLIER, EARLIER, None]
    (kept.loss_for(torch.tensor(3.0)) / 2).backward()
    assert values(found) == [EARLIER + COMPUTED / 2, EARLIER, COMPUTED / 2]


def test_a_step_that_fails_leaves_what_was_there() -> None:
    found = parameters()
    kept = KeptGradients(found, is_first=False, is_seen=False, scale=None)
    with pytest.raises(KeyError), kept.computing():
        raise KeyError
    assert values(found) == [EARLIER, EARLIER, None]
