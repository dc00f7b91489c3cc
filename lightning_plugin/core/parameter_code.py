"""Code of the user's that computes with parameters beside a forward: steps, and the hooks around gradients.

On one device such code reads `self.parameters()` as plain tensors: a penalty on weights, a norm for the log. Here it
runs inside `weft.strategy.local_parameters`, which gives it the same numbers. A model in stages has the parameters of
a rank's own stages alone, so that a sum over all of them is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Methods of a precision plugin: there are no others around on_after_backward and on_before_optimizer_step alone.
CALL_GRADIENT_HOOKS = ("post_backward", "_after_closure")


def run_step(step: Callable[..., Any], module: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
    """Run one of the module's steps; `module`: the one that asking for all parameters of is refused, if any."""
    from weft.strategy import local_parameters
    from weft.strategy.sharded_errors import explained
    from weft.strategy.vocab_head import without_waiting

    with explained(), local_parameters(), _refusing_all_parameters(module):
        return without_waiting(step(*args, **kwargs))


def computing_with_parameters(method: Callable[..., Any], module: nn.Module | None) -> Callable[..., Any]:
    """Return a method that runs as the module's steps do; `module` as in `run_step`."""
    from weft.strategy import local_parameters

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(), _refusing_all_parameters(module):
            return method(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _refusing_all_parameters(module: nn.Module | None) -> Iterator[None]:
    """Inside, `parameters()` of a module raises where layers of it are on other stages; not so in forwards.

    Raises:
        ValueError: from `parameters()` and `named_parameters()`.
    """
    if module is None:
        yield
        return
    from weft.strategy.local_tensor import forward_depth

    incomplete = _incomplete_modules(module)
    depth = forward_depth()

    def refuse(name: str, each: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if forward_depth() > depth:
            return type(each).named_parameters(each, *args, **kwargs)
        raise ValueError(
            f"a step or a hook around gradients asked for the parameters of {repr(name) if name else 'the module'}, "
            "and with pipeline_cuts a rank has those of its own stages alone; use the optimizer's weight_decay, the "
            "Trainer's gradient_clip_val (which logs gradient_norm), or a layout without 'pp'."
        )

    for name, each in incomplete.items():
        each.__dict__["named_parameters"] = functools.partial(refuse, name, each)
    try:
        yield
    finally:
        for each in incomplete.values():
            each.__dict__.pop("named_parameters", None)


def _incomplete_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The layers of other stages, and the modules that they are part of, by name."""
    from weft.strategy.absent import AbsentLayer

    modules = dict(module.named_modules())
    found: dict[str, nn.Module] = {}
    for name, each in modules.items():
        if issubclass(type(each), AbsentLayer):  # isinstance sees the class of the layer itself
            parts = name.split(".")
            found.update({above: modules[above] for above in (".".join(parts[:end]) for end in range(len(parts) + 1))})
    return found
