"""The seconds of operators: measured on this processor with zeros, or from the rates of a device."""

from __future__ import annotations

import statistics
import time
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from weft.strategy._plan import Cluster
from weft.strategy.dry_run.host_seconds import MAPPED_BYTES, seconds_per_mapped_byte, seconds_per_sharded_collective
from weft.strategy.dry_run.temporaries import MAX_BYTES, extent_of, key_of, zeros_like

# A call is timed until it took that long in total, within these numbers. In a step, a call finds few of its arguments
# in the caches of its core, because the calls since they were made have used so many bytes; before each timed call, as
# many bytes are written.
_TOTAL_SECONDS = 2e-3
_LEAST_CALLS, _MOST_CALLS = 3, 7
EVICTING_BYTES = 32 << 20


class OperatorSeconds(Protocol):
    """Returns the seconds of a call, without the time that its caller needs."""

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> float: ...

    def first_write(self, num_bytes: int) -> float:
        """Return the seconds by which the first write to new memory is slower than later ones.

        The times of operators that return new tensors contain it; those of writes to empty tensors do not.
        """

    @property
    def sharded_collective(self) -> float:
        """The seconds of FSDP2's code for one of its collectives, if the device waits for this code."""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the operations of a matrix product, convolution or attention, by torch's formulas; 0 for other calls."""
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


class RooflineSeconds:
    """The longer of two times: that of a call's operations, and that of reading its arguments and writing its result.

    Source: Williams et al. 2009.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        is_half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        rate = self._cluster.half_flops if is_half else self._cluster.float32_flops
        return max(flops_of(func, args, kwargs, result) / rate, num_bytes / self._cluster.bytes_per_second)

    def first_write(self, num_bytes: int) -> float:
        return 0.0

    @property
    def sharded_collective(self) -> float:
        return 0.0


class MeasuredSeconds:
    """The time of each distinct call on this processor, on zeros that are not in its caches.

    This process must have no process group when an instance is made.

    The time of a call with very large tensors is the roofline's.
    Calls are distinct by the shapes, strides and dtypes of their tensors, and by their other arguments.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._roofline = RooflineSeconds(cluster)
        self._known: dict[Any, float] = {}
        self._evicting = torch.zeros(EVICTING_BYTES // 4)
        self._seconds_per_mapped_byte = seconds_per_mapped_byte()
        self._sharded_collective = seconds_per_sharded_collective()

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        leaves, spec = tree_flatten((args, kwargs))
        key = (func, spec, tuple(key_of(leaf, bool(func._schema.returns)) for leaf in leaves))
        try:
            known = self._known.get(key)
        except TypeError:  # an argument without a hash
            return self._roofline.of(func, args, kwargs, result)
        if known is None:
            known = self._measured(func, leaves, spec)
            if known is None:
                known = self._roofline.of(func, args, kwargs, result)
            self._known[key] = known
        return known

    def first_write(self, num_bytes: int) -> float:
        return num_bytes * self._seconds_per_mapped_byte if num_bytes >= MAPPED_BYTES else 0.0

    @property
    def sharded_collective(self) -> float:
        return self._sharded_collective

    def _measured(self, func: Any, leaves: list[Any], spec: Any) -> float | None:
        """Return the median time of a call on zeros; None: it is too large, or zeros are not valid for it."""
        sizes = (extent_of(leaf) * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
        if sum(sizes) > MAX_BYTES:
            return None
        with no_dispatch(), torch.no_grad():
            zeros = [zeros_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(zeros, spec)
            times: list[float] = []
            try:
                func(*args, **kwargs)
                while len(times) < _LEAST_CALLS or (sum(times) < _TOTAL_SECONDS and len(times) < _MOST_CALLS):
                    self._evicting.add_(1)
                    start = time.perf_counter()
                    func(*args, **kwargs)
                    times.append(time.perf_counter() - start)
            except (RuntimeError, NotImplementedError, IndexError, ValueError):
                return None
        return statistics.median(times)
