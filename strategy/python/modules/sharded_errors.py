"""Explains errors that a module's own code raises on shards: names the module, its shards and the remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.strategy.recognition.attention import counts_heads
from weft.strategy.sharding.state import ModuleState, state_of

_SHARD_ERRORS = re.compile(
    r"shape|size|dimension|dim |DTensor|mat1 and mat2|expected input|not enough values|too many values|^weft::", re.I
)
_MAX_SHARDS = 3


class ShardedModuleError(RuntimeError):
    """A module's forward failed on shards; `__cause__` is the original error."""


@contextlib.contextmanager
def explaining_errors() -> Iterator[None]:
    """Replace errors that shards may have caused (shapes, DTensors among tensors) by a ShardedModuleError."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        text = explanation_of(error)
        if text is None:
            raise
        raise ShardedModuleError(text) from error


def explanation_of(error: BaseException) -> str | None:
    """Return one sentence on the module that caused an error: the innermost in the traceback with sharded layers.

    A sharded layer itself is named only if no module whose direct child has shards is in the traceback. None: the error
    has another cause.
    """
    # The texts of these errors name the module, or the ranks, already.
    is_explained = isinstance(error, (ShardedModuleError, dist.DistBackendError))
    if is_explained or not _SHARD_ERRORS.search(str(error)):
        return None
    traceback_modules = list(reversed(_modules_of(error.__traceback__)))
    # The code that calls a layer causes the error, so modules with children come before layers.
    for module in sorted(traceback_modules, key=lambda each: not each._modules):
        state, shards = state_of(module), _shards_of(module)
        if state is not None and shards:
            return _sentence(module, state, shards, error)
    return None


def _modules_of(trace: TracebackType | None) -> list[nn.Module]:
    """Return the modules whose methods are in a traceback, outermost first."""
    modules = []
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            modules.append(module)
        trace = trace.tb_next
    return modules


def _shards_of(module: nn.Module) -> list[tuple[str, ModuleState, DTensor]]:
    """Return (name, state of its module, parameter) for each sharded parameter of a module and its children."""
    found: list[tuple[str, ModuleState, DTensor]] = []
    for name, child in [("", module), *module.named_children()]:
        state = state_of(child)
        if state is None:
            continue
        for parameter_name, parameter in child._parameters.items():
            if isinstance(parameter, DTensor) and parameter._local_tensor.shape != parameter.shape:
                found.append((f"{name}.{parameter_name}" if name else parameter_name, state, parameter))
    return found


def _advice_on_heads(module: nn.Module) -> str:
    """Return the advice to divide an attribute that counts heads and is not divided; "" without such an attribute."""
    state = state_of(module)
    divided = set() if state is None else {name for name, _ in state.local_attributes}
    names = [
        name
        for name, value in module.__dict__.items()
        if type(value) is int and value > 1 and counts_heads(name) and name not in divided
    ]
    return f"if its rules leave out heads, add heads: {names[0]} to those of its column layers; else " if names else ""


def _sentence(
    module: nn.Module, state: ModuleState, shards: list[tuple[str, ModuleState, DTensor]], error: BaseException
) -> str:
    described = [
        f"'{name}' is {list(parameter._local_tensor.shape)} of {list(parameter.shape)} by "
        f"{owner.rule or 'no rule'} ({owner.style or 'replicate'})"
        for name, owner, parameter in shards[:_MAX_SHARDS]
    ]
    more = f" and {len(shards) - _MAX_SHARDS} more" if len(shards) > _MAX_SHARDS else ""
    first_line = (str(error).strip() or "no text").splitlines()[0].rstrip(".")
    where = (
        f"'{state.name}', a {state.original_class.__name__}," if state.name else f"a {state.original_class.__name__}"
    )
    advice = _advice_on_heads(module)
    return (
        f"{where} failed on its shards ({type(error).__name__}: {first_line}): {'; '.join(described)}{more}; {advice}"
        "give its layers the styles column_gather_output and row_split_input, which keep activations full, or "
        "'replicate', and call layers rather than read their weights."
    )
