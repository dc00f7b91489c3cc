"""Compiles the repeated blocks of a model by torch.compile, one code for equal blocks.

A compiled block gets a subclass of its class: names, hooks and state dicts do not change. Only its forward is compiled.
Hooks of the block, those of FSDP2 included, run outside of the compiled code, and a checkpoint of the block inside.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weft.strategy.modules.activation_checkpointing import WrappedForward, repeated_blocks, why_not_wrapped
from weft.strategy.sharding.local_tensor import enter_forward, exit_forward
from weft.strategy.sharding.state import original_class, set_state, state_of

ARGUMENTS = ("backend", "mode", "dynamic", "options", "fullgraph")
_NAME = "_weft_compiled_name"


class CompiledBlockError(RuntimeError):
    """torch.compile failed in a block; `__cause__` is its error."""


class CompiledBlock(WrappedForward):
    """Marks every module that compile_blocks has changed."""

    compile_arguments: Mapping[str, Any]  # of torch.compile


def compile_blocks(model: nn.Module, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Compile the repeated blocks of a model, in place, after `parallelize` and `checkpoint_activations`.

    Blocks of one class share their compiled code, as long as they differ only in tensors. The code is compiled when a
    block is first called, and again when a size first changes, after which the size is dynamic.

    Args:
        model: a plain module, or one that `parallelize` has changed; apply FSDP2 afterwards.
        arguments: those of torch.compile among `ARGUMENTS`; None: torch's defaults.

    Returns:
        The names of the blocks (see `repeated_blocks`), all of which are compiled; [] if the model has none.

    Raises:
        ValueError: a block has no forward in its class, or was compiled with other arguments. No block is changed then.
    """
    arguments = dict(arguments or {})
    names = repeated_blocks(model)
    blocks = {name: model.get_submodule(name) for name in names}
    for name, block in blocks.items():
        _check_block(name, block, arguments)
    # Not kept for other calls: the code of a class has a limited number of compilations, which other models would use.
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for name, block in blocks.items():
        cls = type(block)
        if not isinstance(block, CompiledBlock):
            block.__class__ = classes[cls] = classes.get(cls) or _compiled_class(cls, arguments)
            block.__dict__[_NAME] = name
            _without_edges(block)
    return names


def is_compiled_block(module: nn.Module) -> bool:
    """Return whether compile_blocks has changed a module."""
    return isinstance(module, CompiledBlock)


def has_compiled_blocks(model: nn.Module) -> bool:
    """Return whether a module is a compiled block; its compiled backward may run only once for each forward."""
    return any(map(is_compiled_block, model.modules()))


def check_arguments(owner: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that torch.compile does not have, or whose values it does not accept."""
    unknown = sorted(str(name) for name in arguments.keys() - set(ARGUMENTS))
    if unknown:
        raise ValueError(
            f"{owner} got {unknown[0]!r} among the arguments of torch.compile; pass {', '.join(ARGUMENTS)}."
        )
    try:
        torch.compile(_nothing, **arguments)  # compiles nothing before it is called
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{owner} got {dict(arguments)} for torch.compile, which does not accept it: {reason}; pass another value."
        ) from error


def _nothing() -> None:
    pass


def _check_block(name: str, block: nn.Module, arguments: Mapping[str, Any]) -> None:
    if isinstance(block, CompiledBlock) and block.compile_arguments != arguments:
        raise ValueError(
            f"compile_blocks: '{name}' is compiled with {dict(block.compile_arguments)} already, and not with "
            f"{dict(arguments)}; pass the same arguments again, or build the model anew."
        )
    reason = why_not_wrapped(block)
    if reason is not None:
        raise ValueError(f"compile_blocks: '{name}' is to be compiled, but {reason}; write a forward in its class.")


def _without_edges(block: nn.Module) -> None:
    """Make the first block of a sequence region shard its tokens outside of the compiled code, and the last gather.

    Inside, all blocks of a region are then alike.
    """
    state = state_of(block)
    if state is not None and state.sequence_role is not None:
        inner = dataclasses.replace(state.sequence_role, is_first_block=False, is_last_block=False)
        set_state(block, dataclasses.replace(state, inner_role=inner))


def _compiled_class(cls: type[nn.Module], arguments: Mapping[str, Any]) -> type[nn.Module]:
    own_forward = cls.forward
    compiled = torch.compile(_code_of_its_own(own_forward, cls.__name__), **arguments)

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        role = None if state is None else state.sequence_role
        if role is not None and role.is_first_block:
            args, kwargs = role.prepare_inputs(args, kwargs)
        output = run(self, None if role is None else role.region.lengths, args, kwargs)
        return output if role is None else role.finish_output(output)

    def run(self: nn.Module, lengths: tuple[int, int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():  # the module around it is compiled, too
            return own_forward(self, *args, **kwargs)
        enter_forward()  # suspends the mode of `local_parameters`, which would be a part of the compiled code
        try:
            return compiled(self, lengths, args, kwargs)
        except _compiler_errors() as error:
            raise CompiledBlockError(_sentence(self, error)) from error
        finally:
            exit_forward()

    namespace = {"__module__": cls.__module__, "forward": forward, "compile_arguments": dict(arguments)}
    return type(cls.__name__, (CompiledBlock, cls), namespace)


def _code_of_its_own(own_forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function (block, lengths, args, kwargs) that calls `own_forward`.

    torch.compile keeps what it compiles with the code of a function. `lengths`: of the block's sequence region, if it
    has one; numbers among the arguments of compiled code may be dynamic, and those in attributes of a module may not.
    """

    def forward(self: Any, lengths: tuple[int, int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if lengths is not None:
            self._weft_state.sequence_role.region.lengths = lengths  # the same numbers
        return own_forward(self, *args, **kwargs)

    code = forward.__code__.replace(co_name=f"forward_of_{name}")
    return types.FunctionType(code, forward.__globals__, code.co_name, closure=forward.__closure__)


def _compiler_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def _sentence(block: nn.Module, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".") if lines else "no text"
    return (
        f"torch.compile failed in the block '{block.__dict__.get(_NAME, '')}', a {original_class(block).__name__} "
        f"({type(error).__name__}: {reason}); leave compile out, or pass another backend, such as "
        "compile={'backend': 'aot_eager'}, to see which part fails."
    )
