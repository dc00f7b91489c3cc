"""Replaces the parameters of optimizers that were built before the model was sharded."""

from __future__ import annotations

import weakref

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class ParameterReplacements:
    """Maps the original parameters of modules to those that replaced them, without keeping the originals alive."""

    def __init__(self) -> None:
        self._new = WeakIdKeyDictionary()

    def record(self, before: dict[str, weakref.ref[Parameter]], module: Module) -> None:
        """Record parameters that the module has replaced since `parameters_of` returned `before`."""
        now = dict(module.named_parameters(remove_duplicate=False))
        for name, reference in before.items():
            old, new = reference(), now.get(name)
            if old is not None and new is not None and old is not new:
                self._new[old] = new

    def update_optimizer(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's parameters by the modules' current ones; its groups keep their options.

        Raises:
            RuntimeError: the optimizer has state of original parameters, whose shapes no longer fit.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stale = [parameter for parameter in parameters if parameter in self._new]
        if not stale:
            return
        if any(parameter in optimizer.state for parameter in stale):
            raise RuntimeError(
                f"{type(optimizer).__name__} has state of {len(stale)} parameters that sharding has replaced; "
                "set the optimizer up before its first step, or create it after the model was set up."
            )
        for group in optimizer.param_groups:
            group["params"] = [self._new.get(parameter, parameter) for parameter in group["params"]]


def parameters_of(module: Module) -> dict[str, weakref.ref[Parameter]]:
    """Return weak references to the parameters, by name."""
    return {name: weakref.ref(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
