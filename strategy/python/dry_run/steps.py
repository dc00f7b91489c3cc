"""Runs the steps of a dry run in the order in which the Trainer runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft import memory
from weft.strategy.data_parallel import GradientReducer
from weft.strategy.data_parallel.fully_sharded import free_gathered, set_gradient_sync
from weft.strategy.dry_run.counting_mode import CountingMode
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.stages import Stages
from weft.strategy.dry_run.step_clock import StepClock
from weft.strategy.optimizers.in_backward import StepInBackward


class Steps:
    """A sharded model with what its steps need.

    Args:
        loss_fn: (model, batch) -> loss.
        reducer: averages gradients over replicas; None: FSDP2 or `stepper` does, or there are none.
        stepper: steps inside the backward; None: the optimizer steps after it.
    """

    def __init__(
        self,
        request: Request,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        counting: CountingMode,
        watch: memory.Watch,
        reducer: GradientReducer | None,
        stepper: StepInBackward | None,
    ) -> None:
        self._request = request
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._counting = counting
        self._watch = watch
        self._reducer = reducer
        self._stepper = stepper

    def run(self, batch: Any, clock: StepClock | None) -> None:
        """Run a step; of several batches whose gradients are accumulated, the first and the last are played."""
        num_batches = self._request.accumulate_grad_batches
        self._play(batch, is_first=True, is_last=num_batches == 1)
        if num_batches > 1:
            if clock is not None:
                clock.repeat(num_batches - 1)
            self._play(batch, is_first=False, is_last=True)
        if self._reducer is not None:
            self._reducer.finish()
        self._step()

    def run_in_stages(self, batch: Any, stages: Stages) -> None:
        """Run a step of a pipeline."""
        self._watch.forward_begins(batch)
        self._optimizer.zero_grad()  # under Lightning, the step frees the gradients of the step before
        with self._request.computing(), self._stepping():
            stages.step(batch, self._loss_fn)
        self._step()

    def _play(self, batch: Any, is_first: bool, is_last: bool) -> None:
        """Run forward and backward; gradients are reduced for the last batch of a step only, as by the Trainer."""
        self._watch.forward_begins(batch)
        with self._request.computing():
            loss = self._loss_fn(self._model, batch)
        if is_first:
            self._optimizer.zero_grad()  # as under Lightning, whose closure does so between forward and backward
        self._watch.backward_begins()
        if self._request.shards_parameters and not (is_first and is_last):
            set_gradient_sync(self._model, is_last)
        with self._stepping() if is_last else self._accumulating():
            loss.backward()

    @contextlib.contextmanager
    def _accumulating(self) -> Any:
        with contextlib.ExitStack() as stack:
            if self._reducer is not None:
                stack.enter_context(self._reducer.paused())
            if self._stepper is not None:
                stack.enter_context(self._stepper.accumulating())
            yield

    def _stepping(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._stepper is None else self._counting.keeping_scalars()

    def _step(self) -> None:
        with self._counting.keeping_scalars():
            self._optimizer.step()
        free_gathered(self._model)
