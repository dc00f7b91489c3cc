"""Gradients that a training step has computed already, kept out of the way until its backward is asked for.

A Trainer zeroes gradients between `training_step` and the backward, and the schedule of a pipeline has run by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class KeptGradients:
    """Gradients of one step: `computing` around what computes them, then `loss_for` for what is handed to the Trainer.

    parameters: all that get gradients.
    is_first: whether gradients are zeroed before the backward; else it adds to those of batches before.
    is_seen: whether hooks see the gradients that are zeroed, or other code zeroes them.
    scale: what the gradients are multiplied by already, and the loss will be; None: it is unknown what the loss will be
        multiplied by, and the gradients will be then.

    Gradients that are zeroed unseen are freed before the step. Those of a later batch are added
    to the earlier ones at once, where their scale is known. So one set is alive, and in other cases two.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], is_first: bool, is_seen: bool, scale: float | None) -> None:
        self._parameters = list(parameters)
        self._adds_at_once = not is_first and scale is not None
        self._frees_earlier = is_first and not is_seen
        self._scale = scale
        self._kept: list[Tensor | None] = []

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Gradients that are computed inside are kept."""
        if self._adds_at_once:
            yield
            return
        earlier = [None if self._frees_earlier else p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            self._kept = [parameter.grad for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, earlier, strict=True):
                parameter.grad = gradient

    def loss_for(self, loss: Tensor) -> Tensor:
        """The loss, `[]`, whose backward gives the parameters what was kept."""
        return _Loss.apply(loss.detach().requires_grad_(), self)

    def install(self, factor: Tensor) -> None:
        """Add what was kept to the parameters' gradients; `factor`: what the loss was multiplied by."""
        for parameter, gradient in zip(self._parameters, self._kept, strict=True) if self._kept else ():
            if gradient is None:
                continue
            if self._scale is None:
                gradient.mul_(factor.to(gradient.dtype))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._kept = []


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, kept: KeptGradients) -> Tensor:
        ctx.kept = kept
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        with torch.no_grad():
            ctx.kept.install(gradient)
        return None, None
