"""Replaces the parameters of optimizers that were built before the model was sharded."""

from __future__ import annotations

import weakref
from collections import Counter

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from weft._plugin.optimizer_state import expert_states


class ParameterReplacements:
    """Maps the original parameters of modules to those that replaced them, without keeping the originals alive."""

    def __init__(self) -> None:
        self._new = WeakIdKeyDictionary()
        self._num_joined = WeakIdKeyDictionary()  # how many originals of experts are one new parameter, by original

    def record(self, before: dict[str, weakref.ref[Parameter]], module: Module) -> None:
        """Record parameters that the module has replaced since `parameters_of` returned `before`."""
        now: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        states = expert_states(module, {parameter: name for name, parameter in now.items()})
        stacks = {} if states is None else {name: stack for name, (stack, _) in states.members().items()}
        num_joined = Counter(stacks.values())
        now.update(stacks)
        for name, reference in before.items():
            old, new = reference(), now.get(name)
            if old is not None and new is not None and old is not new:
                self._new[old] = new
                self._num_joined[old] = num_joined.get(new, 1)

    def update_optimizer(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's parameters by the modules' current ones; its groups keep their options.

        Raises:
            RuntimeError: the optimizer has state of original parameters, whose shapes no longer fit; or a group has
                parameters of only some experts, which are one parameter now.
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
        expected = {self._new[parameter]: self._num_joined[parameter] for parameter in stale}
        new = [[self._new.get(each, each) for each in group["params"]] for group in optimizer.param_groups]
        for parameter, count in (item for parameters in new for item in Counter(parameters).items()):
            if count != expected.get(parameter, count):
                raise RuntimeError(
                    f"a group of {type(optimizer).__name__} has a parameter of {count} experts, and expected are all "
                    f"{expected[parameter]} that sharding has joined; put the experts of a list into one group, or "
                    "create the optimizer after the model was set up."
                )
        for group, parameters in zip(optimizer.param_groups, new, strict=True):
            group["params"] = list(dict.fromkeys(parameters))


def parameters_of(module: Module) -> dict[str, weakref.ref[Parameter]]:
    """Return weak references to the parameters, by name."""
    return {name: weakref.ref(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
