"""`deferred_init`: a context in which large tensors are created as DeferredTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.strategy.deferred.files import deferring_files
from weft.strategy.deferred.stream import EMPTY
from weft.strategy.deferred.tape import Tape
from weft.strategy.deferred.tensor import DeferredTensor, call, record, record_in_place
from weft.strategy.deferred.unwritten import mark_unwritten

# Smaller tensors are created as usual: they take little memory, and most code that reads values reads small tensors.
MIN_BYTES = 16 * 1024

aten = torch.ops.aten
_IN_PLACE_DRAWS = {
    aten.rand.default: aten.uniform_.default,
    aten.rand.generator: aten.uniform_.default,
    aten.randn.default: aten.normal_.default,
    aten.randn.generator: aten.normal_.default,
}


class _DeferringMode(TorchDispatchMode):
    def __init__(self, tape: Tape, min_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._min_bytes = tape, min_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, DeferredTensor) for leaf in leaves):
            return call(func, args, kwargs)
        device = torch.device(kwargs.get("device") or "cpu")
        is_factory = not any(isinstance(leaf, Tensor) for leaf in leaves) and "device" in _argument_names(func)
        dtype = self._dtype_if_large(func, args, kwargs) if is_factory and device.type != "meta" else None
        if dtype is None:
            made = func(*args, **kwargs)
            return mark_unwritten(made) if func in EMPTY else made
        if "dtype" in _argument_names(func):
            kwargs = {**kwargs, "dtype": dtype}  # torch's default dtype may be another one at the replay
        if func in _IN_PLACE_DRAWS:
            generator = kwargs.pop("generator", None)
            made = record(self._tape, aten.empty.memory_format, args[:1], kwargs, device)
            return call(_IN_PLACE_DRAWS[func], (made,), {} if generator is None else {"generator": generator})
        return record(self._tape, func, args, kwargs, device)

    def _dtype_if_large(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype of the tensor that a call makes; None: it is to be made now, or makes no tensor."""
        try:
            with no_dispatch():
                made = func(*args, **{**kwargs, "device": torch.device("meta")})
        except (NotImplementedError, RuntimeError):
            return None  # a size that depends on values, or an invalid call: the call on real tensors raises the error
        is_large = isinstance(made, Tensor) and made.numel() * made.element_size() >= self._min_bytes
        return made.dtype if is_large else None


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


@contextmanager
def deferred_init(min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Build a model with deferred parameters, whose values `weft.parallelize` materializes.

    It materializes only a rank's shards where values can be drawn in chunks (`normal_`, `uniform_`, constants, ...); it
    materializes replicated parameters, and those of other functions until they are sharded, in full, one at a time.

    The values are bitwise those that the model would have without this context: calls are recorded in program order,
    with the state of the random generators, and the generators advance as usual. Code that reads the values of a tensor
    gets them; the tensor is then materialized in full.

        with weft.strategy.deferred_init():
            model = Model()
        weft.parallelize(model, mesh, plan)

    Args:
        min_bytes: smaller tensors are created as usual.
    """
    tape = Tape()
    original = init._no_grad_trunc_normal_

    def trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Newer versions of torch draw again for values that they reject: the number of draws depends on the values.
        if isinstance(tensor, DeferredTensor):
            return record_in_place(original, tensor, args, kwargs)
        return original(tensor, *args, **kwargs)

    init._no_grad_trunc_normal_ = trunc_normal
    try:
        with deferring_files(tape, min_bytes), _DeferringMode(tape, min_bytes):
            yield
    finally:
        init._no_grad_trunc_normal_ = original
