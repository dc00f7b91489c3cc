"""Gradients of a step that are deferred until its backward: their values, and how many sets of them are alive."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from weft._plugin.deferred_gradients import DeferredGradients

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
@pytest.mark.parametrize("zeroing_is_observed", [False, True])
def test_first_batch_replaces_gradients(zeroing_is_observed: bool, scale: float | None) -> None:
    found = parameters()
    earlier = weakref.ref(found[0].grad)
    deferred = DeferredGradients(found, is_first=True, zeroing_is_observed=zeroing_is_observed, scale=scale)
    with deferred.computing():
        compute(found)
        assert (earlier() is None) == (not zeroing_is_observed)
    loss = deferred.attach_to_loss(torch.tensor(3.0))
    # As in the Trainer: zero the gradients, then run the backward of the loss, or of the loss that it has scaled.
    assert values(found) == ([EARLIER, EARLIER, None] if zeroing_is_observed else [None, None, None])
    for parameter in found:
        parameter.grad = None
    assert loss.item() == 3
    (loss if scale is not None else loss * 4).backward()
    expected = COMPUTED if scale is not None else 4 * COMPUTED
    assert values(found) == [expected, None, expected]


def test_later_batch_accumulates_in_place() -> None:
    found = parameters()
    first = found[0].grad
    deferred = DeferredGradients(found, is_first=False, zeroing_is_observed=True, scale=0.5)
    with deferred.computing():
        compute(found)
        assert found[0].grad is first
    loss = deferred.attach_to_loss(torch.tensor(3.0))
    loss.backward()
    assert values(found) == [EARLIER + COMPUTED, EARLIER, COMPUTED]


def test_unknown_scale_defers_accumulation() -> None:
    found = parameters()
    deferred = DeferredGradients(found, is_first=False, zeroing_is_observed=False, scale=None)
    with deferred.computing():
        compute(found)
    assert values(found) == [EARLIER, EARLIER, None]
    (deferred.attach_to_loss(torch.tensor(3.0)) / 2).backward()
    assert values(found) == [EARLIER + COMPUTED / 2, EARLIER, COMPUTED / 2]


def test_failed_step_leaves_gradients_unchanged() -> None:
    found = parameters()
    deferred = DeferredGradients(found, is_first=False, zeroing_is_observed=False, scale=None)
    with pytest.raises(KeyError), deferred.computing():
        raise KeyError
    assert values(found) == [EARLIER, EARLIER, None]
