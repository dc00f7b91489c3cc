"""Compares gradients of replicated parameters in a tensor-parallel group, after the first backward of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from weft._plugin.engine import Engine


class FirstGradients:
    """Compares the gradients of one strategy's modules, once in each run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_checked = False
        self._fingerprints: dict[Tensor, Tensor] = {}

    def restart(self) -> None:
        """Compare again after the next backward; called when a run begins or a module is added."""
        self._is_checked = False

    def record(self, parameter: Tensor) -> None:
        """If `check` is to compare this complete gradient, record its fingerprint: the gradient is freed before."""
        from weft.strategy import gradient_fingerprint

        is_replicated = any(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
        if is_replicated and not self._is_checked:
            self._fingerprints[parameter] = gradient_fingerprint(parameter)

    def check(self, modules: list[nn.Module]) -> None:
        """After a run's first backward, raise ValueError if gradients of replicated parameters differ between ranks."""
        if self._engine.plan is None or self._is_checked:
            return
        if self._engine.tensor_parallel_group.size() == 1:
            self._is_checked = True
            self._fingerprints.clear()
            return
        from weft.strategy import check_replicated_gradients

        parameters = (parameter for module in modules for parameter in module.parameters())
        if not self._fingerprints and all(parameter.grad is None for parameter in parameters):
            return  # FSDP2 does not set `grad` while gradients are only accumulated
        self._is_checked = True
        for module in modules:
            check_replicated_gradients(module, self._fingerprints, self._engine.data_axes.group)
        self._fingerprints.clear()
