"""A tensor that code reads as the full tensor, while each rank holds the shard of its tokens.

`ShardedSequence` has the full tensor's shape. `__torch_function__` looks for a rule of the function that is called,
which computes with the shards; without a rule, or where it does not apply, the full tensors are gathered. Results are
those of one device either way, and so a model needs no change: positions, masks and the shift between inputs and
targets are those of the full sequence.

Gradients: autograd sees only the shards and the collectives between them, each of which has the backward of what it
does (an all-gather has a reduce-scatter, a sum over the ranks a sum over the ranks). Every rank computes the same loss,
so the ranks together differentiate its sum over the ranks, and each rank's gradient of a parameter is a part of that
sum. The mean over the ranks, as data parallelism computes it, is the gradient of the loss.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from weft.strategy.context.layout import Place
from weft.strategy.torch_functions import writes_in_place

Rule = Callable[..., Any]
GATHER = object()  # the result of a rule that does not apply

_RULES: dict[Any, Rule] = {}
_RULES_BY_NAME: list[Callable[[str], Rule | None]] = []
_DECORATORS = ("__get__", "__set__", "__delete__")


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule: a function (func, args, kwargs) that returns the result of func(*args, **kwargs), or GATHER."""

    def register(made: Rule) -> Rule:
        _RULES.update(dict.fromkeys(functions, made))
        return made

    return register


def rules_by_name(find: Callable[[str], Rule | None]) -> Callable[[str], Rule | None]:
    """Register a function that finds the rule of a function without one by its name."""
    _RULES_BY_NAME.append(find)
    return find


@functools.cache
def _rule_of(func: Any) -> Rule | None:
    if func in _RULES:
        return _RULES[func]
    name = getattr(func, "__name__", "")
    if name in _DECORATORS:
        return None
    return next((found for find in _RULES_BY_NAME if (found := find(name)) is not None), None)


class ShardedSequence(Tensor):
    """A tensor whose tokens are sharded over a context-parallel group; see the module's docstring.

    Attributes:
        place: the tokens that this rank has, and their dim.
        is_watched: whether a backward that reaches the sequence itself raises; see `_watch_autograd_functions`.
    """

    _local: Tensor
    place: Place
    is_watched: bool

    @staticmethod
    def __new__(cls, local: Tensor, place: Place) -> ShardedSequence:
        made: ShardedSequence = Tensor._make_wrapper_subclass(
            cls, place.full_shape(local), dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made._local, made.place, made.is_watched = local, place, False
        return made

    @property
    def local(self) -> Tensor:
        """Return this rank's shard, a plain tensor with the graph.

        Raises:
            ValueError: an autograd function has returned this sequence, whose graph the shard does not have.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_leaf:
                raise ValueError(_THROUGH_A_FUNCTION)
        return self._local

    @property
    def num_dims(self) -> int:
        """Return the number of dims, faster than dim(), which is looked up among the rules."""
        return self._local.dim()

    def full(self) -> Tensor:
        """Return the full tensor, plain, on every rank; collective. The backward reduce-scatters the gradient."""
        return gather(self.local, self.place)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # mypy ignores keywords of special methods
        return f"ShardedSequence({list(self.shape)}, {self.dtype}, {self.place})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            _watch_autograd_functions(args)
        found = _rule_of(func)
        if found is not None:
            result = found(func, *_usual(args, kwargs)) if kwargs else found(func, args, kwargs)
            if result is not GATHER:
                return result
        return _on_full(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(
            f"{func} got a sequence that is sharded over context-parallel ranks below autograd, where it cannot be "
            "gathered, as in an autograd function or with a backward hook of a module; leave these out."
        )


def _usual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with torch's names in place of those of NumPy, and the input by position, as rules read them."""
    if "axis" in kwargs or "keepdims" in kwargs:
        kwargs = {_USUAL_NAMES.get(name, name): each for name, each in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        args, kwargs = (kwargs["input"],), {name: each for name, each in kwargs.items() if name != "input"}
    return args, kwargs


_USUAL_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def _watch_autograd_functions(args: tuple[Any, ...]) -> None:
    """Let a later backward raise if these arguments are those of a torch.autograd.Function.

    The graph of an autograd function begins at the sequence itself, which is in no other graph; that function computes
    without recording, as other code may do, too.
    """
    for each in args:
        if isinstance(each, ShardedSequence) and each.local.requires_grad and not each.is_watched:
            each.is_watched = True
            follow_shard(each)
            with torch._C.DisableTorchFunctionSubclass():
                each.register_hook(_raise_in_backward)


def follow_shard(x: ShardedSequence) -> None:
    """Let a sequence require a gradient if its shard does, which functions in place have changed."""
    with torch._C.DisableTorchFunctionSubclass():
        if x._local.requires_grad and not x.requires_grad:
            x.requires_grad_()


def _raise_in_backward(gradient: Tensor) -> None:
    raise ValueError(_THROUGH_A_FUNCTION)


_THROUGH_A_FUNCTION = (
    "a sequence that is sharded over context-parallel ranks went through a torch.autograd.Function, such as a "
    "reentrant checkpoint or a backward hook of a module, which loses its gradient; replace it by functions of torch "
    "(a checkpoint with use_reentrant=False), or leave out context parallelism."
)


def redistributed(x: ShardedSequence, place: Place) -> Tensor:
    """Return the shard at another place of a sharded sequence, which is gathered; collective."""
    if x.place == place:
        return x.local
    _warn_gathers("an operation of sequences whose tokens are on different ranks")
    return shard(x.full(), place)


def _on_full(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with full tensors, which are gathered."""
    name = getattr(func, "__name__", str(func))
    if writes_in_place(name) and args and isinstance(args[0], ShardedSequence):
        return _change_full(func, name, args, kwargs)
    changed = tree_leaves((args[:1] if name == "__set__" else (), kwargs.get("out")))
    if any(isinstance(each, ShardedSequence) for each in changed):
        _raise_changes(name)
    _warn_gathers(name)
    args, kwargs = tree_map_only(ShardedSequence, ShardedSequence.full, (args, kwargs))
    return func(*args, **kwargs)


def _change_full(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that changes its first argument in place with the full tensor, and change the shard by it."""
    changed: ShardedSequence = args[0]
    _warn_gathers(name)
    full = changed.full().clone()
    rest, kwargs = tree_map_only(ShardedSequence, ShardedSequence.full, (args[1:], kwargs))
    result = func(full, *rest, **kwargs)
    if full.shape != changed.shape:
        _raise_changes(name)
    changed.local.copy_(_shard(full, changed.place))
    follow_shard(changed)
    return changed if result is full else result


def _raise_changes(name: str) -> None:
    # Not a TypeError: Python would replace `x += y` by `x = x + y`, which other references to x do not see.
    raise ValueError(
        f"{name} would change a sequence that is sharded over context-parallel ranks, other than the values of its "
        "first argument; compute a new tensor."
    )


_READS = {
    "item",
    "tolist",
    "numpy",
    "backward",
    "__bool__",
    "__float__",
    "__int__",
    "__format__",
    "__repr__",
    "__array__",
}


@functools.cache
def _warn_gathers(name: str) -> None:
    """Warn once for each function that it needs all tokens."""
    if name not in _READS:
        warnings.warn(
            f"weft gathers all tokens on every context-parallel rank for {name}, which has no sharded form; its "
            "result, and what is computed from it, is replicated.",
            stacklevel=4,
        )


def wrap(result: Any, place: Place) -> Any:
    """Return a shard, or the shards in a tuple or list, as a sharded sequence."""
    if isinstance(result, Tensor):
        return ShardedSequence(result, place)
    if isinstance(result, (tuple, list)):
        return type(result)([wrap(each, place) for each in result])
    return result


def shard_of(value: Any) -> Any:
    """Return the shard of a sharded sequence; any other value unchanged."""
    return value._local if type(value) is ShardedSequence else value


def like(value: Tensor, shard: Tensor) -> Tensor:
    """Return `shard`, with which a forward begins, as a sequence with the place of `value`, if that is one."""
    if type(value) is not ShardedSequence:
        return shard
    forget_kept()
    return ShardedSequence(shard, value.place)


def separate(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a value with shards in place of sharded sequences, and a function that makes them sequences again.

    The shards pass code that computes nothing, but has autograd functions. The function takes a value of the same
    structure.
    """
    leaves, spec = tree_flatten(value)
    places = {i: each.place for i, each in enumerate(leaves) if isinstance(each, ShardedSequence)}
    if not places:
        return value, lambda changed: changed

    def join(changed: Any) -> Any:
        inner, inner_spec = tree_flatten(changed)
        for i, place in places.items():
            inner[i] = ShardedSequence(inner[i], place)
        return tree_unflatten(inner, inner_spec)

    return tree_unflatten([each.local if i in places else each for i, each in enumerate(leaves)], spec), join


def num_ranks_and_rank(place: Place) -> tuple[int, int]:
    return len(place.layout.intervals), place.layout.rank


# ---- between shards and full tensors -----------------------------------------------------------------------


def gather(local: Tensor, place: Place) -> Tensor:
    """Return the full tensor of a shard, on every rank; the backward reduce-scatters the gradient. Collective."""
    layout, dim = place.layout, place.dim
    before, after = list(local.shape[:dim]), list(local.shape[dim + 1 :])
    x = local.reshape(*before, place.outer, layout.own_length, place.inner, *after)
    token_dim = dim + 1
    longest = max(layout.lengths)
    if layout.own_length < longest:
        padding = list(x.shape)
        padding[token_dim] = longest - layout.own_length
        x = torch.cat([x, x.new_zeros(padding)], token_dim)
    is_bool = x.dtype == torch.bool
    x = torch.ops.weft.gather_from_sequence(x.to(torch.uint8) if is_bool else x, token_dim, layout.group_name)
    rows = layout.gathered_rows(x.device)
    x = x if rows is None else x.index_select(token_dim, rows)
    full: Tensor = (x.bool() if is_bool else x).reshape(*before, place.full_size, *after)
    return full


def shard(full: Tensor, place: Place) -> Tensor:
    """Return this rank's shard of a tensor that is equal on all ranks, without communication."""
    if full.requires_grad:
        return _shard(full, place)
    # Tables of positions and masks are used by each layer.
    made: Tensor = kept_with(full, place, lambda: _shard(full, place))
    return made


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def kept_with(tensor: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """Return make(), which depends on a tensor's values, or its earlier result for the same view in this forward.

    Results are kept as long as the tensor that `tensor` is a view of, except views of it, and tensors without values.
    They are not kept for the next forward: an optimizer may have changed the values without a new version.
    """
    if tensor.is_inference():
        return make()
    base = tensor if tensor._base is None else tensor._base
    results = _kept.get(base, {})
    bits = (tensor.is_conj(), tensor.is_neg())
    view = (key, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, bits, tensor._version)
    if view in results:
        return results[view]
    made = make()
    # A view would keep its base, and a fake tensor belongs to a recording or a dry run.
    if not isinstance(made, Tensor) or (type(made) is Tensor and made._base is None and made is not tensor):
        _kept.setdefault(base, {})[view] = made
    return made


def forget_kept() -> None:
    """Forget all results of `kept_with`, at the begin of a forward."""
    _kept.clear()


def _shard(full: Tensor, place: Place) -> Tensor:
    layout, dim = place.layout, place.dim
    if not place.is_joined:
        return _tokens(full, dim, place)
    before, after = list(full.shape[:dim]), list(full.shape[dim + 1 :])
    x = _tokens(full.reshape(*before, place.outer, layout.size, place.inner, *after), dim + 1, place)
    return x.reshape(*before, place.own_size, *after)


def _tokens(full: Tensor, dim: int, place: Place) -> Tensor:
    chunks = [full.narrow(dim, start, stop - start) for start, stop in place.layout.own]
    if not chunks:
        return full.narrow(dim, 0, 0)
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)


def sum_over_ranks(x: Tensor, place: Place) -> Tensor:
    """Return the sum of the ranks' tensors, plain, on every rank; the backward sums gradients. Collective."""
    group_name = place.layout.group_name
    total: Tensor = torch.ops.weft.copy_to_group(torch.ops.weft.reduce_from_group(x, group_name), group_name)
    return total


def full_sequences(value: Any) -> Any:
    """Replace the sharded sequences in a value by full tensors; collective if there are any."""
    return tree_map_only(ShardedSequence, ShardedSequence.full, value)
