"""Runs the user's hooks, of the LightningModule and of callbacks, inside `weft.strategy.local_parameters`.

Steps, and the hooks between a backward and the optimizer's step, run inside it anyway: see `parameter_code`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from weft._plugin.parameter_code import with_local_parameters

_LOOPS = ("train", "validation", "test", "predict")
# The hooks from the end of the strategy's setup to its teardown; those between a backward and a step are left out.
HOOKS = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    *(f"on_{loop}{when}" for loop in _LOOPS for when in ("_start", "_end", "_epoch_start", "_epoch_end")),
    *(f"on_{loop}_batch_{when}" for loop in _LOOPS for when in ("start", "end")),
    "on_before_zero_grad",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
_LIBRARIES = ("lightning", "pytorch_lightning", "weft")


class HookParameters:
    """Replaces the hooks of one run's LightningModule and callbacks, from `begin` to `end`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def begin(self, owners: Iterable[Any], module_in_stages: nn.Module | None) -> None:
        """Replace the hooks that user code defines.

        Args:
            owners: the LightningModule and the callbacks.
            module_in_stages: the LightningModule, if it is divided into stages; its `parameters()` then warns in a
                hook.
        """
        self.end()
        for owner in owners:
            for name in HOOKS:
                own: Any = getattr(owner, name, None)
                function = getattr(own, "__func__", None)
                is_defined_by_user = function is not None and function.__module__.partition(".")[0] not in _LIBRARIES
                if is_defined_by_user and name not in vars(owner):
                    self._replace(owner, name, with_local_parameters(own, module_in_stages))
            if module_in_stages is not None and any(cls.__name__ == "ModelSummary" for cls in type(owner).__mro__):
                self._replace(owner, "on_fit_start", _counting_all_stages(owner.on_fit_start, module_in_stages))

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        vars(owner)[name] = _Hook(owner, name, function)
        self._replaced.append((owner, name))

    def end(self) -> None:
        """Restore the hooks."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()


def _counting_all_stages(summarize: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return the hook of a ModelSummary, which then counts the parameters of all stages."""
    from weft.strategy.pipeline import find_staged
    from weft.strategy.sharding.remote_layers import counted_parameters

    @functools.wraps(summarize)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = find_staged(module)
        assert found is not None
        with counted_parameters(found[1].model, found[1].skeleton):
            return summarize(*args, **kwargs)

    return wrapped


class _Hook:
    """A replaced hook; a copy of its owner, and a pickled one, has the hook of the class instead."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._owner, self._name, self._function = owner, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)
