"""Gradients of a step that are deferred until its backward: their values, and how many sets of gradients exist."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from weft._plugin.deferred_gradients import DeferredGradients

EARLIER, COMPUTED = 5.0, 2.0


def parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for parameter in params[:2]:
        parameter.grad = torch.full((3,), EARLIER)
    return params


def run_backward(params: list[nn.Parameter]) -> None:
    """Run the backward of a loss that does not depend on the second parameter."""
    (COMPUTED * (params[0].sum() + params[2].sum())).backward()


def values(params: list[nn.Parameter]) -> list[float | None]:
    return [None if parameter.grad is None else parameter.grad[0].item() for parameter in params]


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("keeps_earlier_until_zeroed", [False, True])
def test_first_batch_replaces_gradients(keeps_earlier_until_zeroed: bool, scale: float | None) -> None:
    params = parameters()
    earlier = weakref.ref(params[0].grad)
    deferred = DeferredGradients(
        params, is_first=True, keeps_earlier_until_zeroed=keeps_earlier_until_zeroed, scale=scale
    )
    with deferred.computing():
        run_backward(params)
        assert (earlier() is None) == (not keeps_earlier_until_zeroed)
    loss = deferred.attach_to_loss(torch.tensor(3.0))
    assert values(params) == ([EARLIER, EARLIER, None] if keeps_earlier_until_zeroed else [None, None, None])
    # Like the Trainer, zero the gradients, then run the backward of the loss; the Trainer scales it if `scale` is None.
    for parameter in params:
        parameter.grad = None
    assert loss.item() == 3
    (loss if scale is not None else loss * 4).backward()
    expected = COMPUTED if scale is not None else 4 * COMPUTED
    assert values(params) == [expected, None, expected]


def test_later_batch_accumulates_in_place() -> None:
    params = parameters()
    first = params[0].grad
    deferred = DeferredGradients(params, is_first=False, keeps_earlier_until_zeroed=True, scale=0.5)
    with deferred.computing():
        run_backward(params)
        assert params[0].grad is first
    loss = deferred.attach_to_loss(torch.tensor(3.0))
    loss.backward()
    assert values(params) == [EARLIER + COMPUTED, EARLIER, COMPUTED]


def test_unknown_scale_defers_accumulation() -> None:
    params = parameters()
    deferred = DeferredGradients(params, is_first=False, keeps_earlier_until_zeroed=False, scale=None)
    with deferred.computing():
        run_backward(params)
    assert values(params) == [EARLIER, EARLIER, None]
    (deferred.attach_to_loss(torch.tensor(3.0)) / 2).backward()
    assert values(params) == [EARLIER + COMPUTED / 2, EARLIER, COMPUTED / 2]


def test_failed_step_leaves_gradients_unchanged() -> None:
    params = parameters()
    deferred = DeferredGradients(params, is_first=False, keeps_earlier_until_zeroed=False, scale=None)
    with pytest.raises(KeyError), deferred.computing():
        raise KeyError
    assert values(params) == [EARLIER, EARLIER, None]
