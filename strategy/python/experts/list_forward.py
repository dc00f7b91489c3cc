"""The forward around a list of sharded experts, which calls them one by one.

Which experts it calls with which tokens is known after it has called them; their results are needed then. So it runs
twice. The first pass records the calls, and gives zeros in place of results. The recorded tensors of all calls travel
together to the ranks of their experts, and the results back. The second pass repeats the calls, and gets the results.

Gradients of the results reach the tokens through the recorded tensors, which are part of the first pass' graph; its
other parts, and the second pass' inputs of experts, are freed unused.

The first pass has no effects: random generators, buffers and attributes have their old values after it, and it gets
copies of the arguments.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.strategy.experts.list_modules import Calls
from weft.strategy.sharding.state import cached

_LISTS = "_weft_expert_lists"
_MUTABLE = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_OF_MODULES = frozenset(nn.Module().__dict__)  # tables of hooks, modules and parameters


class _Tied(torch.autograd.Function):
    """A tensor itself; its backward also reaches `other`, with zeros: all ranks take part in the exchange."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        [other] = ctx.saved_tensors
        return grad, torch.zeros_like(other)


class _Effects:
    """The state that a forward of a module may change: generators, buffers, attributes. `undo` restores it.

    Until then, the module has copies of its buffers.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        for each in module.modules():
            for table in (each.__dict__, each._buffers):
                self._attributes.append((table, dict(table)))
            own = (value for name, value in each.__dict__.items() if name not in _OF_MODULES)
            self._contents += [(value, value.copy()) for value in own if type(value) in _MUTABLE]
            each._buffers.update({name: b.detach().clone() for name, b in each._buffers.items() if b is not None})
        self._cuda = device if device.type == "cuda" else None
        cuda = () if self._cuda is None else (torch.cuda.get_rng_state(self._cuda),)
        self._random = (torch.get_rng_state(), *cuda)

    def undo(self) -> None:
        """Restore everything but the states of generators."""
        for table, before in self._attributes:
            if table.keys() != before.keys() or any(table[name] is not value for name, value in before.items()):
                table.clear()
                table.update(before)
        for content, before in self._contents:
            content.clear()
            content.extend(before) if isinstance(content, (list, collections.deque)) else content.update(before)

    def undo_random(self) -> None:
        """Restore the states of generators."""
        torch.set_rng_state(self._random[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._random[1], self._cuda)

    def seed_by_rank(self, rank: int) -> None:
        """Give this rank's experts random numbers of their own: the next of the stream are those of later modules."""
        seed = int(torch.randint(1 << 62, ())) + rank
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            with torch.cuda.device(self._cuda):
                torch.cuda.manual_seed(seed)


def _two_passes(module: nn.Module, own_forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    lists = [module.get_submodule(name) if name else module for name in module.__dict__[_LISTS]]
    tokens = next((each for each in tree_leaves((args, kwargs)) if _is_floating(each) and each.dim() > 1), None)
    if tokens is None:
        raise TypeError(
            f"a {type(module).__name__} with sharded experts got no floating-point tensor [..., h]; pass the tokens, "
            "or leave expert parallelism out."
        )
    all_calls: list[Calls] = [each.__dict__["_weft_calls"] for each in lists]
    effects = _Effects(module, tokens.device)
    try:
        _begin(all_calls, "record")
        own_forward(module, *_copies(args), **_copies(kwargs))
        effects.undo()
        reached: list[Tensor] = []
        needs_gradients = torch.is_grad_enabled() and (
            tokens.requires_grad or any(parameter.requires_grad for parameter in module.parameters())
        )
        for each, calls in zip(lists, all_calls, strict=True):
            stacked: Any = each.stacked
            effects.seed_by_rank(stacked._weft_experts.mesh.get_rank())
            reached += _exchange(stacked, calls, tokens, needs_gradients)
        effects.undo_random()
        _begin(all_calls, "answer")
        result = own_forward(module, *args, **kwargs)
        for calls in all_calls:
            calls.check_all_answered()
    finally:
        for calls in all_calls:
            calls.end()
    return functools.reduce(_tied, reached, result) if needs_gradients else result


def _begin(all_calls: Iterable[Calls], mode: str) -> None:
    for calls in all_calls:
        calls.begin(mode)


def _copies(arguments: Any) -> Any:
    """Return arguments with copies of tensors, which the first pass may change in place."""
    return tree_map_only(Tensor, torch.clone, arguments)


def _exchange(stacked: nn.Module, calls: Calls, tokens: Tensor, needs_gradients: bool) -> list[Tensor]:
    """Compute the results of recorded calls; return the results if no call depends on them."""
    width = tokens.size(-1)
    rows = [tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0) for _, tensor in calls.inputs]
    other = next((each for each in rows if each.size(-1) != width), None)
    if other is not None:
        raise RuntimeError(
            f"an expert of a sharded list got {list(other.shape)} in a forward with tokens {list(tokens.shape)}; "
            "expected is the same last size: leave expert parallelism out for this model."
        )
    ids = [torch.full((len(each),), idx, device=each.device) for (idx, _), each in zip(calls.inputs, rows, strict=True)]
    joined = torch.cat(rows) if rows else tokens.new_zeros(0, width)
    if needs_gradients and not joined.requires_grad:
        joined = joined.detach().requires_grad_()  # all ranks take part in the backward
    results = stacked(joined, torch.cat(ids) if ids else joined.new_zeros(0, dtype=torch.int64))
    # Not views, so that the forward may change them in place.
    parts = torch.unsafe_split_with_sizes(results, [len(each) for each in rows], 0) if rows else ()
    calls.results = [part.view(tensor.shape) for part, (_, tensor) in zip(parts, calls.inputs, strict=True)]
    return [] if len(joined) else [results]


def _tied(result: Any, other: Tensor) -> Any:
    """Return a forward's result, whose backward reaches `other`."""
    leaves = [each for each in tree_leaves(result) if _is_floating(each)]
    first = max(leaves, key=lambda each: each.requires_grad, default=None)
    if first is None:
        return result
    tied = _Tied.apply(first, other)
    return tree_map_only(Tensor, lambda each: tied if each is first else each, result)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@cached
def calling_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module whose forward calls sharded experts, and whose own class is `cls`."""
    own_forward = cls.forward

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _two_passes(self, own_forward, args, kwargs)

    return type(f"Weft{cls.__name__}", (cls,), {"__module__": cls.__module__, "forward": forward})


def add_list(module: nn.Module, name: str) -> None:
    """Give a module the forward of two passes. `name`: of a list in the module whose experts it calls; "": itself."""
    if _LISTS not in module.__dict__:
        module.__dict__[_LISTS] = ()
        module.__class__ = calling_class(type(module))
    module.__dict__[_LISTS] += (name,)
