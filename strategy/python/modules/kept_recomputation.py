"""A checkpoint for backwards in two halves: it recomputes activations once, and keeps them until the graph is freed.

torch's non-reentrant checkpoint frees a recomputed activation at its first use, so each further backward over the same
graph recomputes all of them. The halves of a split backward (`weft.strategy.pipeline.backward`) both use the
activations of a layer with weights, and the second half runs a backward for each of these layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

_keeps: ContextVar[bool] = ContextVar("keeps", default=False)

Contexts = Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]


@contextlib.contextmanager
def keeping_recomputed(keeps: bool = True) -> Iterator[None]:
    """Inside, `checkpoint` keeps recomputed activations until their graph is freed, if `keeps`."""
    token = _keeps.set(keeps)
    try:
        yield
    finally:
        _keeps.reset(token)


def checkpoint(function: Callable[..., Any], *args: Any, contexts: Contexts | None = None) -> Any:
    """Call a function that is called again in the backward, which needs its intermediate results.

    As torch's non-reentrant checkpoint, with the random numbers and the autocast settings of the first call; inside of
    `keeping_recomputed`, results of the second call are kept until the graph is freed.

    Args:
        function: computes the same tensors in both calls.
        args: its arguments. Tensors among them are saved for the backward, so that hooks of saved tensors see them.
        contexts: makes a pair of context managers, for the first and the second call.
    """
    if torch.compiler.is_compiling() or not _keeps.get():
        # torch.compile does not support a context_fn that does nothing.
        options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **options)
    first, second = (contextlib.nullcontext(), contextlib.nullcontext()) if contexts is None else contexts()
    if hasattr(first, "respect_saved_tensors_hooks"):  # of a selective checkpoint: what it saves is not recomputed
        first.respect_saved_tensors_hooks = False
    region = _Region(function, args, second)
    with first, torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
        return function(*args)


class _Region:
    """One call of a checkpointed function.

    The tensors that the call saves are numbered, and the graph keeps their numbers. The first number that a backward
    unpacks makes the function run again, until it has saved as many tensors. The nodes of the graph own the region.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], context: Any) -> None:
        self._function = function
        self._context = context
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []  # of the saved tensors
        self._values: list[Tensor] | None = None
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        self._others = [None if isinstance(arg, Tensor) else arg for arg in args]
        self._positions = [idx for idx, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._needs_gradient = [tensor.requires_grad for tensor in tensors]
        self._saver = _Inputs.apply(torch.empty((), requires_grad=True), *tensors).grad_fn
        self._settings = _Settings([leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)])

    def pack(self, tensor: Tensor) -> int:
        self._kinds.append((tensor.shape, tensor.dtype))
        return len(self._kinds) - 1

    def unpack(self, number: int) -> Tensor:
        if self._values is None:
            self._values = self._recompute()
        return self._values[number]

    def _recompute(self) -> list[Tensor]:
        args = list(self._others)
        inputs = zip(self._positions, self._saver.saved_tensors, self._needs_gradient, strict=True)
        for position, tensor, needs_gradient in inputs:
            args[position] = tensor.detach().requires_grad_(needs_gradient)
        values: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            values.append(tensor.detach())
            if len(values) == len(self._kinds):
                raise _SavedAllError

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack_nothing)
        with self._settings.restored(), torch.enable_grad(), keeping_recomputed(), self._context, hooks:
            with contextlib.suppress(_SavedAllError):
                self._function(*args)
        if (found := [(value.shape, value.dtype) for value in values]) != self._kinds:
            raise RuntimeError(
                f"activation checkpoint: the recomputed forward saved {len(found)} tensors, the first of other shapes "
                f"or dtypes than in the forward, which saved {len(self._kinds)}; let the forward depend only on its "
                "arguments, parameters and random numbers."
            )
        return values


class _SavedAllError(Exception):
    """Ends a recomputation once the last saved tensor is computed."""


def _unpack_nothing(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward")


class _Inputs(torch.autograd.Function):
    """Saves the inputs of a region in a node of its own, with the hooks of saved tensors around the region."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("nothing depends on the result")


class _Settings:
    """The states of random generators and the autocast settings at one time, on the CPU and the tensors' devices."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._random = torch.get_rng_state()
        self._devices, self._device_states = torch_checkpoint.get_device_states(*tensors)
        types = (tensor.device.type for tensor in tensors)
        self._device_types = list(dict.fromkeys(each for each in types if each not in ("cpu", "meta")))
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", *self._device_types)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the settings are those of the time; afterwards, those before."""
        with contextlib.ExitStack() as stack:
            device_type = next(iter(self._device_types), "cuda")
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=device_type))
            torch.set_rng_state(self._random)
            if self._devices:
                torch_checkpoint.set_device_states(self._devices, self._device_states, device_type=device_type)
            for kind, dtype, is_enabled, is_cached in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, is_enabled, is_cached))
            yield
