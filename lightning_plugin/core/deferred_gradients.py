"""Holds a pipeline's gradients from `training_step`, which computes them, until the Trainer calls the backward.

Between `training_step` and the backward, the Trainer zeroes gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class DeferredGradients:
    """Holds the gradients of one step: compute them inside `computing`, then give the Trainer `attach_to_loss(loss)`.

    parameters: all parameters that get gradients.
    is_first: whether gradients are zeroed before the backward; else the backward adds to gradients of earlier batches.
    keeps_earlier_until_zeroed: if `is_first`, keep the gradients of earlier batches until the Trainer zeroes them,
        because hooks may read them before that; False: free them before `computing`, which saves the memory of one set.
    scale: the factor that the gradients already contain, and by which the Trainer will multiply the loss; None: the
        factor is unknown before the backward, which then multiplies the gradients by it.

    If the scale is known, the step of a later accumulated batch adds its gradients to the earlier ones directly. In
    this case, or if earlier gradients do not exist or are freed, one set of gradients is in memory during the step;
    otherwise there are two.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], is_first: bool, keeps_earlier_until_zeroed: bool, scale: float | None
    ) -> None:
        self._parameters = list(parameters)
        self._adds_at_once = not is_first and scale is not None
        self._frees_earlier = is_first and not keeps_earlier_until_zeroed
        self._scale = scale
        self._gradients: list[Tensor | None] = []

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Keep the gradients that are computed inside for `install`, unless they are added to earlier ones directly."""
        if self._adds_at_once:
            yield
            return
        earlier = [None if self._frees_earlier else p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            self._gradients = [parameter.grad for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, earlier, strict=True):
                parameter.grad = gradient

    def attach_to_loss(self, loss: Tensor) -> Tensor:
        """Return the loss, a scalar; its backward calls `install`."""
        attached: Tensor = _Loss.apply(loss.detach().requires_grad_(), self)
        return attached

    def install(self, factor: Tensor) -> None:
        """Add the kept gradients to those of the parameters; `factor`: the number that the loss was multiplied by."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True) if self._gradients else ():
            if gradient is None:
                continue
            if self._scale is None:
                gradient.mul_(factor.to(gradient.dtype))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._gradients = []


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.deferred = deferred
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        with torch.no_grad():
            ctx.deferred.install(gradient)
        return None, None
