"""The logits that an output layer with the style vocab_head returns; each rank computes only its own classes.

`F.cross_entropy` and `nn.CrossEntropyLoss` of logits `[tokens, v]`, with class indices as targets and without class
weights, run the vocabulary-parallel operators on the layer's input: full logits are never materialized. Metadata, views
that keep the classes and casts that keep the loss need no logits, either; in-place operations raise; any other
operation gathers full logits, on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map_only

_MARK = "_weft_vocab_head"
_GATHER = object()  # the result of a function in _SPECIAL that needs full logits


@dataclasses.dataclass(frozen=True)
class Head:
    """An output layer on one rank: the rows of its weight `[v, d]` and bias `[v]` from `vocab_start` on."""

    weight: Tensor
    bias: Tensor | None
    vocab_start: int
    vocab_size: int
    group_name: str
    parameter: Tensor  # of which `weight` is this rank's shard
    version: int  # `version_of(parameter, weight)` at the forward; the logits must come from these values

    def logits(self, hidden: Tensor) -> Tensor:
        """Return full logits, `[..., vocab_size]`."""
        self._check_not_stale()
        shard_logits = torch.ops.weft.column_linear(hidden, self.weight, self.bias, group_name=self.group_name)
        return torch.ops.weft.gather_from_group(
            shard_logits, shard_logits.dim() - 1, self.group_name, dim_size=self.vocab_size
        )

    def loss(self, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Return the cross-entropy of hidden states `[..., d]` with targets `[...]`."""
        self._check_not_stale()
        options = {"group_name": self.group_name, "vocab_size": self.vocab_size, **options}
        if self.bias is None:
            return torch.ops.weft.vocab_parallel_linear_cross_entropy(
                hidden, self.weight, target, self.vocab_start, **options
            )
        shard_logits = torch.ops.weft.column_linear(hidden, self.weight, self.bias, group_name=self.group_name)
        return torch.ops.weft.vocab_parallel_cross_entropy(shard_logits, target, self.vocab_start, **options)

    def _check_not_stale(self) -> None:
        if self.weight.untyped_storage().nbytes() == 0 and self.weight.numel() > 0:
            what = "freed, which FSDP2 does after the forward of a module that it gathers"
        elif version_of(self.parameter, self.weight) != self.version:
            what = "changed, as an optimizer's step does"
        else:
            return
        raise ValueError(
            f"logits of a vocab_head were used after the weight they come from was {what}; use them before, or give "
            "the output layer the style 'column_gather_output'."
        )


def head_of(
    parameter: Tensor, weight: Tensor, bias: Tensor | None, vocab_start: int, vocab_size: int, group_name: str
) -> Head:
    """Return the head with the current weight of `parameter`."""
    _watch_optimizers()
    parameter.__dict__[_MARK] = True
    return Head(weight, bias, vocab_start, vocab_size, group_name, parameter, version_of(parameter, weight))


@functools.cache
def _watch_optimizers() -> None:
    """Increment the versions of heads' parameters after each optimizer step: torch's fused kernels do not."""

    def count(optimizer: Optimizer, *_: Any) -> None:
        changed = [p for group in optimizer.param_groups for p in group["params"] if _MARK in p.__dict__]
        torch.autograd.graph.increment_version(changed)

    register_optimizer_step_post_hook(count)


def version_of(*tensors: Tensor) -> int:
    """Return how often values were changed through these tensors; inference tensors count as 0.

    A DTensor and its local tensor have separate versions: the former counts in-place calls on the DTensor, the latter
    those on the local tensor and on views of it, such as flat shards.
    """
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


class VocabParallelLogits(Tensor):
    """Logits `[..., vocab_size]` that are not computed yet: hidden states and their output layer.

    Views that keep the last dim, and casts that do not affect a loss, give deferred logits again. `F.cross_entropy` of
    `[tokens, v]` with class indices and without class weights is computed from the hidden states. In-place operations
    raise. Any other operation but metadata is applied to full logits, so all ranks of the group must run it.
    """

    _head: Head
    _hidden: Tensor
    _version_of_hidden: int
    _full_logits: Tensor | None

    @staticmethod
    def __new__(cls, head: Head, hidden: Tensor, dtype: torch.dtype | None = None) -> VocabParallelLogits:
        shape = (*hidden.shape[:-1], head.vocab_size)
        dtype = dtype or hidden.dtype
        made: VocabParallelLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made._head, made._hidden, made._full_logits = head, hidden, None
        made._version_of_hidden = version_of(hidden)
        return made

    def full_logits(self) -> Tensor:
        """Return the full logits as a plain tensor, gathered; collective."""
        if self._full_logits is None or (torch.is_grad_enabled() and not self._full_logits.requires_grad):
            self._check_not_stale()
            self._full_logits = self._head.logits(self._hidden).to(self.dtype)
        assert self._full_logits is not None
        return self._full_logits

    def _check_not_stale(self) -> None:
        if self.requires_grad:  # deferred logits themselves are in no graph
            what = "went through an autograd function, such as a reentrant checkpoint, which does not see their origin"
        elif version_of(self._hidden) != self._version_of_hidden:
            what = "were used after the hidden states they come from were changed in place"
        else:
            return
        raise ValueError(
            f"logits of a vocab_head {what}; avoid that, or give the output layer the style 'column_gather_output'."
        )

    def _has_graph(self) -> bool:
        """Return whether full logits with a graph exist: they may have hooks, so results must be computed from them."""
        return self._full_logits is not None and self._full_logits.requires_grad

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # mypy ignores keywords of special methods
        return f"VocabParallelLogits({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        changed = tree_leaves((args[:1] if _changes_in_place(func, kwargs) else (), kwargs.get("out")))
        if any(isinstance(each, VocabParallelLogits) for each in changed):
            # Not a TypeError: Python would replace `x += y` by `x = x + y`, which other references to x do not see.
            raise ValueError(
                f"{func.__name__} would change logits of a vocab_head in place, which are not computed yet; compute "
                "new ones from them, or give the output layer the style 'column_gather_output'."
            )
        special = _SPECIAL.get(func)
        if special is not None and args and isinstance(args[0], VocabParallelLogits) and not args[0]._has_graph():
            result = special(*args, **kwargs)
            if result is not _GATHER:
                return result
        args, kwargs = tree_map_only(VocabParallelLogits, cls.full_logits, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(
            f"{func} got logits of a vocab_head below autograd, where they cannot be gathered; give the output layer "
            "the style 'column_gather_output'."
        )


def materialize_logits(result: Any) -> Any:
    """Replace deferred logits in a result by full ones, before it reaches code that only some ranks run; collective."""
    return tree_map_only(VocabParallelLogits, VocabParallelLogits.full_logits, result)


def _changes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name in _OPERATORS_IN_PLACE or kwargs.get("inplace") is True


def _cast(logits: VocabParallelLogits, dtype: torch.dtype) -> Any:
    """Return deferred logits cast to `dtype`; _GATHER if the cast affects a loss, whose statistics are in float32."""
    hidden = logits._hidden.dtype
    is_same = dtype == hidden or (dtype == torch.float32 and hidden in (torch.bfloat16, torch.float16))
    return VocabParallelLogits(logits._head, logits._hidden, dtype) if is_same else _GATHER


def _to(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    wanted = (*args, *kwargs.values())
    is_dtype = len(wanted) == 1 and isinstance(wanted[0], torch.dtype) and set(kwargs) <= {"dtype"}
    return _cast(logits, wanted[0]) if is_dtype else _GATHER


def _reshape(logits: VocabParallelLogits, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or len(sizes) < 2 or sizes[-1] != logits._head.vocab_size:
        return _GATHER
    return _with_hidden(logits, logits._hidden.reshape(*sizes[:-1], logits._hidden.shape[-1]))


def _flatten(logits: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = logits.dim() - 1
    start, end = (dim % logits.dim() for dim in (start_dim, end_dim))
    return _with_hidden(logits, logits._hidden.flatten(start, end)) if start <= end < last else _GATHER


def _getitem(logits: VocabParallelLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, VocabParallelLogits) for item in items):
        return _GATHER
    num_used = sum(_num_dims(item) for item in items)
    reaches_last = num_used == logits.dim() or any(item is Ellipsis for item in items)
    keeps_last = isinstance(items[-1], slice) and items[-1] == slice(None) if items else True
    if items and items[-1] is Ellipsis:
        keeps_last = num_used < logits.dim()
    return _with_hidden(logits, logits._hidden[index]) if keeps_last or not reaches_last else _GATHER


def _num_dims(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _with_hidden(logits: VocabParallelLogits, hidden: Tensor) -> VocabParallelLogits:
    return VocabParallelLogits(logits._head, hidden, logits.dtype)


def _cross_entropy(
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_plain = weight is None and size_average is None and reduce is None and target.dtype in (torch.int64, torch.int32)
    if not is_plain or logits.dim() > 2:  # the classes would be dim 1
        return _GATHER
    logits._check_not_stale()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    loss = logits._head.loss(logits._hidden, target, **options)
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


_OPERATORS_IN_PLACE = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")),
}
_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    ),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.get_device),
}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.float: functools.partial(_cast, dtype=torch.float32),
    Tensor.to: _to,
    Tensor.contiguous: lambda logits: logits,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _getitem,
    F.cross_entropy: _cross_entropy,
}
