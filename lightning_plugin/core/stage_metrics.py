"""Handles torchmetrics metrics of a LightningModule in stages: steps update metrics only on the last stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module


class StageMetrics:
    """Makes `compute` of each metric in a module return the last stage's value on every stage.

    module: the LightningModule that contains the metrics.
    excluded: the modules of the model in stages; metrics among them are left unchanged.
    broadcast_from_last_stage: calls a function on the last stage and returns its result on every stage; collective.
    """

    def __init__(
        self, module: Module, excluded: Iterable[Module], broadcast_from_last_stage: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._broadcast_from_last_stage = broadcast_from_last_stage
        self._is_local_only = False  # inside a step, or another metric's compute
        self._original_computes: list[tuple[Module, Any]] = []
        excluded = set(excluded)
        for metric in module.modules():
            if _is_metric(metric) and metric not in excluded:
                self._wrap_compute(metric)

    def _wrap_compute(self, metric: Any) -> None:
        # The wrapper of an earlier run may still be installed; `_weft_own` is the method that it wraps.
        original = getattr(metric.compute, "_weft_own", metric.compute)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if self._is_local_only or not dist.is_initialized():
                return original(*args, **kwargs)
            with self.local_only():
                return self._broadcast_from_last_stage(lambda: original(*args, **kwargs))

        compute._weft_own = original  # type: ignore[attr-defined]
        object.__setattr__(metric, "compute", compute)
        self._original_computes.append((metric, original))

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Inside, compute metrics on this rank only; used in steps, of which only the last stage runs all code."""
        before, self._is_local_only = self._is_local_only, True
        try:
            yield
        finally:
            self._is_local_only = before

    @contextlib.contextmanager
    def updates_disabled(self) -> Iterator[None]:
        """Inside, do not update metrics; used in calls of a step that do not run the last stage."""
        names = ("update", "forward")
        replaced = [
            (vars(metric), {n: vars(metric)[n] for n in names if n in vars(metric)})
            for metric, _ in self._original_computes
        ]
        for attributes, _ in replaced:
            attributes.update(update=_do_nothing, forward=_return_zero)
        try:
            yield
        finally:
            for attributes, originals in replaced:
                for name in names:
                    del attributes[name]
                attributes.update(originals)

    def remove(self) -> None:
        """Restore the metrics' own `compute`."""
        for metric, original in self._original_computes:
            object.__setattr__(metric, "compute", original)
        self._original_computes.clear()


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _return_zero(*_args: Any, **_kwargs: Any) -> Tensor:
    return torch.zeros(())  # a value that may be logged


def names_of_metrics(module: Module) -> list[str]:
    """Return the names of a module's metrics."""
    return [name for name, each in module.named_modules() if _is_metric(each)]


def _is_metric(module: Module) -> bool:
    return any(cls.__name__ == "Metric" and cls.__module__.startswith("torchmetrics") for cls in type(module).__mro__)
