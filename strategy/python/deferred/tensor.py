"""DeferredTensor: a tensor with a shape, a dtype, a device and so on, but without values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.strategy.deferred.stream import is_drawn_in_chunks, skip
from weft.strategy.deferred.tape import Entry, RandomState, Tape, meta_tensors, storage_of

# Calls whose result is a Python value, which depends on the tensor's values.
_VALUE_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}
_DATA: Any = Tensor.data  # a descriptor


class _NeedsValuesError(Exception):
    """The shape of a call's result depends on values, or the call is invalid and must raise its error when executed."""


class DeferredTensor(Tensor):
    """Looks like a tensor on its device; calls on it are recorded on a tape instead of executed.

    Code that needs values (`item()`, `if tensor.any()`, a shape that depends on values, a collective, a write to a
    plain tensor) materializes the full tensor; from then on, calls on tensors in its storage are executed at once.
    """

    meta: Tensor
    tape: Tape

    @staticmethod
    def __new__(cls, meta: Tensor, tape: Tape, device: torch.device) -> DeferredTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
        )
        made.meta, made.tape = meta, tape
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch: a classmethod

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Put the call on the tape."""
        return call(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """Return `Tensor.data`. An assigned tensor becomes the one that this object represents."""
        data: Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        new: Any = value
        if not isinstance(new, DeferredTensor):
            new = record(self.tape, torch.ops.aten.clone.default, (value.detach(),), {}, value.device)
        _DATA.__set__(self, new)
        self.meta, self.tape = new.meta, new.tape

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredTensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.clone(memory_format=torch.preserve_format)
            copied.requires_grad_(self.requires_grad)
            for name, item in self.__dict__.items():
                if name not in ("meta", "tape"):
                    setattr(copied, name, copy.deepcopy(item, memo))
            memo[id(self)] = copied
        made: DeferredTensor = memo[id(self)]
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # repr() passes no keywords
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call with at least one deferred tensor among its arguments, or execute it if it needs values."""
    arguments = _Arguments(args, kwargs)
    deferred = [leaf for leaf in arguments.leaves if isinstance(leaf, DeferredTensor)]
    tape = deferred[0].tape
    needs_values = (
        func in _VALUE_READS
        or func.namespace in ("c10d", "_c10d_functional")
        or any(
            isinstance(leaf, Tensor) and not isinstance(leaf, DeferredTensor) for leaf in _written(func, args, kwargs)
        )
        or any(storage_of(tensor.meta) in tape.materialized for tensor in deferred)
    )
    if needs_values:
        return _call_with_values(func, args, kwargs)
    device = _with_index(torch.device(kwargs["device"])) if kwargs.get("device") is not None else deferred[0].device
    try:
        return _record(tape, func, arguments, device)
    except _NeedsValuesError:
        return _call_with_values(func, args, kwargs)


class _Arguments:
    """The arguments of a call, flattened once: pytree would take most of the time that the recording of a call takes.

    leaves: tensors, and all else that contains no tensors, such as a list of sizes.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves = [*args, *kwargs.values()]
        self._spec: Any = None
        if any(isinstance(leaf, (list, tuple, dict)) and not _is_plain_list(leaf) for leaf in self.leaves):
            self.leaves, self._spec = tree_flatten((args, kwargs))

    def mapped(self, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the result of `function` in place of each leaf."""
        new = [function(leaf) for leaf in self.leaves]
        if self._spec is not None:
            args, kwargs = tree_unflatten(new, self._spec)
            return args, kwargs
        count = len(self.args)
        return tuple(new[:count]), dict(zip(self.kwargs, new[count:], strict=True))


def _is_plain_list(value: Any) -> bool:
    """Return whether a value is a list or tuple without tensors and containers."""
    return type(value) in (list, tuple) and not any(isinstance(item, (Tensor, list, tuple, dict)) for item in value)


def _with_index(device: torch.device) -> torch.device:
    """Return a device as a tensor on it has it: a CUDA device with its index."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def record(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Record a call on the tape; the tensors that it creates are deferred tensors on `device`."""
    return _record(tape, func, _Arguments(args, kwargs), device)


def _record(tape: Tape, func: Any, arguments: _Arguments, device: torch.device) -> Any:
    """See `record`."""
    tensors = [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor)]
    meta_args, meta_kwargs = arguments.mapped(_without_values)
    if "device" in arguments.kwargs or not tensors:
        meta_kwargs["device"] = torch.device("meta")
    try:
        with no_dispatch():
            result = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise _NeedsValuesError from error
    plain_args, plain_kwargs = arguments.mapped(_plain)
    plain_tensors = [_plain(leaf) for leaf in tensors]
    inputs = {id(tensor) for tensor in plain_tensors if tensor.is_meta}
    changed = {storage_of(tensor) for tensor in meta_tensors(_written(func, plain_args, plain_kwargs))}
    made = {storage_of(tensor) for tensor in meta_tensors(result) if id(tensor) not in inputs}
    versions = tuple((tensor, tensor._version) for tensor in plain_tensors if not tensor.is_meta)
    random = _advance_generator(func, plain_args, plain_kwargs, result, device)
    tape.record(Entry(func, plain_args, plain_kwargs, result, frozenset(changed | made), versions, random))

    wrappers = {id(leaf.meta): leaf for leaf in tensors if isinstance(leaf, DeferredTensor)}
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*arguments.args, **arguments.kwargs)  # updates the shape of the deferred tensor itself

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return wrappers[id(leaf)] if id(leaf) in wrappers else DeferredTensor(leaf, tape, device)

    return wrapped(result) if isinstance(result, Tensor) else tree_map(wrapped, result)


def record_in_place(function: Any, tensor: DeferredTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Record a function that changes one tensor in place; a run on an uninitialised tensor advances the generator."""
    generator = kwargs.get("generator") or generator_of(tensor.device)
    random = RandomState(generator, generator.get_state())
    with no_dispatch():
        function(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    written = frozenset({storage_of(tensor.meta)})
    tensor.tape.record(Entry(function, (tensor.meta, *args), kwargs, tensor.meta, written, (), random))
    return tensor


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    # Initialises CUDA, before which it has no generators.
    current = torch.cuda.current_device()
    return torch.cuda.default_generators[current if device.index is None else device.index]


def _plain(leaf: Any) -> Any:
    return leaf.meta if isinstance(leaf, DeferredTensor) else leaf


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, DeferredTensor):
        return leaf.meta
    if isinstance(leaf, Tensor) and leaf.dim() > 0:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the schema marks as written."""
    written: list[Any] = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        written += [value] if isinstance(value, Tensor) else tree_leaves(value)
    return written


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _advance_generator(func: Any, args: Any, kwargs: Any, result: Any, device: torch.device) -> RandomState | None:
    """Advance the generator as the call would, so that the program draws the same numbers afterwards.

    Returns:
        The generator with its state before the call; None for a call that draws no numbers.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator") or generator_of(device)
    random = RandomState(generator, generator.get_state())
    [target] = meta_tensors(result)
    rest = tuple(args[1:])
    with no_dispatch():
        # With a generator of another device type, the call below raises torch's error.
        if generator.device.type == device.type and is_drawn_in_chunks(func, rest, target, generator.device):
            skip(func, rest, kwargs, target, generator.device)
        elif func._schema.is_mutable:
            full = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=device)
            func(full, *rest, **kwargs)
        else:
            func(*args, **kwargs)
    return random


def _call_with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = tree_map(lambda leaf: value_of(leaf) if isinstance(leaf, DeferredTensor) else leaf, (args, kwargs))
    return func(*values[0], **values[1])


def value_of(tensor: DeferredTensor) -> Tensor:
    """Return the full tensor; from now on, calls on the deferred tensor run on the full tensor."""
    storage = storage_of(tensor.meta)
    if storage not in tensor.tape.materialized:
        [full] = tensor.tape.replay([tensor.meta])
        tensor.tape.materialized[storage] = full
    full = tensor.tape.materialized[storage]
    return full.as_strided(tensor.meta.shape, tensor.meta.stride(), tensor.meta.storage_offset())
