"""Runs user code that computes with parameters outside of a forward: steps, and the hooks around gradients.

On one device, such code reads `self.parameters()` as plain tensors: a penalty on weights, a norm for the log. With
weft, the code runs inside `weft.strategy.local_parameters`, which gives the same values. If the model is divided into
stages, a rank has only the parameters of its own stages: `parameters()` of a module with layers on other stages (an
incomplete module) raises ValueError in a step, and warns in a gradient hook.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Methods of the Trainer's precision plugin: `post_backward` calls the hook on_after_backward, and `_after_closure`
# calls on_before_optimizer_step and gradient clipping.
CALL_GRADIENT_HOOKS = ("post_backward", "_after_closure")


def run_step(step: Callable[..., Any], module: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a step; `module`: the LightningModule with stages, whose `parameters()` raises, or None."""
    from weft.strategy import local_parameters
    from weft.strategy.modules.sharded_errors import explaining_errors
    from weft.strategy.modules.vocab_head import materialize_logits

    with explaining_errors(), local_parameters(), _watching_parameters(module, _raise_incomplete):
        return materialize_logits(step(*args, **kwargs))


def with_local_parameters(method: Callable[..., Any], module: nn.Module | None) -> Callable[..., Any]:
    """Return `method` wrapped to run inside `local_parameters`, in which steps also run.

    module: the LightningModule with stages, whose `parameters()` then warns, or None.
    """
    from weft.strategy import local_parameters

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(), _watching_parameters(module, _warn):
            return method(*args, **kwargs)

    return wrapped


def _raise_incomplete(name: str) -> None:
    raise ValueError(
        f"a step called parameters() of {_module_text(name)}, and with pipeline_cuts a rank has only the parameters of "
        "its own stages; use the optimizer's weight_decay instead of a penalty, or a layout without 'pp'."
    )


def _warn(name: str) -> None:
    warnings.warn(
        f"weft: a hook called parameters() of {_module_text(name)}, and with pipeline_cuts it gets only the "
        "parameters of this rank's own stages; gradient_clip_val logs the norm of all gradients as gradient_norm.",
        stacklevel=4,
    )


def _module_text(name: str) -> str:
    return repr(name) if name else "the module"


@contextlib.contextmanager
def _watching_parameters(module: nn.Module | None, on_access: Callable[[str], None]) -> Iterator[None]:
    """Inside, `parameters()` of a module with layers on other stages calls `on_access(name)`.

    It does not in forwards, nor in `generate` of Transformers, which asks the first parameter for its device.
    """
    if module is None:
        yield
        return
    from weft.strategy.pipeline import find_staged
    from weft.strategy.sharding.local_tensor import forward_depth

    incomplete = _incomplete_modules(module)
    depth = forward_depth()
    found = find_staged(module)

    def named_parameters(name: str, each: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        is_generating = found is not None and found[1].is_generating
        if forward_depth() == depth and not is_generating:
            on_access(name)
        return type(each).named_parameters(each, *args, **kwargs)

    for name, each in incomplete.items():
        each.__dict__["named_parameters"] = functools.partial(named_parameters, name, each)
    try:
        yield
    finally:
        for each in incomplete.values():
            each.__dict__.pop("named_parameters", None)


def _incomplete_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of other stages, and the modules that contain them, by name."""
    from weft.strategy.sharding.remote_layers import RemoteLayer

    modules = dict(module.named_modules())
    found: dict[str, nn.Module] = {}
    for name, each in modules.items():
        if issubclass(type(each), RemoteLayer):  # isinstance sees the class of the layer itself
            parts = name.split(".")
            found.update({above: modules[above] for above in (".".join(parts[:end]) for end in range(len(parts) + 1))})
    return found
