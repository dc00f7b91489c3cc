"""Reads and controls the counter of `weft.memory`."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import _memory
from weft.memory.source import source

CATEGORIES: tuple[str, ...] = _memory.CATEGORIES
"""The names of the memory categories. "scratch" is the temporary memory of operators and optimizers."""


@dataclass(frozen=True)
class Phase:
    """The time from one call of `begin_phase` to the next.

    Attributes:
        name: the name given to `begin_phase`; "start" before the first call. The hooks of `watch` begin "forward",
            "inference", "backward", "step" and "between steps".
        seconds: from the start of counting to the start of the phase.
        peak: bytes by category when the total in the phase was largest.
    """

    name: str
    seconds: float
    peak: dict[str, int]


def track(known: Iterable[torch.Tensor] = ()) -> None:
    """Count the memory of all new CPU tensors from now on, until the process ends.

    Existing tensors are not counted: a warning says how many bytes they hold. Later calls do nothing.

    Args:
        known: existing tensors to leave out of the warning, because the caller counts their bytes by itself; see
            `tag_parameters`.
    """
    if not _memory.track():
        return
    existing = storages(tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, torch.nn.Parameter))
    for address in storages(known):
        existing.pop(address, None)
    if num_bytes := sum(tensor.untyped_storage().nbytes() for tensor in existing.values()):
        warnings.warn(
            f"weft.memory.track() came after {len(existing)} tensors with {num_bytes} bytes, which are not counted; "
            "call it before the tensors are created, or set WEFT_MEMORY=1 before `import weft`.",
            stacklevel=2,
        )


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return one tensor for each CPU storage, by the storage's address; for a DTensor, the local shard.

    Tensors without memory (meta, fake, lazy, empty) are left out.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        is_without_memory = isinstance(local, FakeTensor) or torch.nn.parameter.is_lazy(local)
        if local.layout is torch.strided and local.is_cpu and not is_without_memory:
            found[local.untyped_storage().data_ptr()] = local
    found.pop(0, None)
    return found


def track_if_requested() -> None:
    """Call `track()` if WEFT_MEMORY=1 is set in the environment."""
    value = os.environ.get("WEFT_MEMORY", "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"got WEFT_MEMORY={value}; set it to 1 to count memory, or to 0.")
    if value == "1":
        track()


def is_tracking() -> bool:
    """Return whether CPU tensors are counted."""
    return source().is_tracking()


def _check_tracking() -> None:
    if not is_tracking():
        raise RuntimeError(
            "weft.memory counts nothing yet: set WEFT_MEMORY=1 before `import weft`, or call weft.memory.track() "
            "before the first tensor is made."
        )


def _is_cuda(device: torch.device | str) -> bool:
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"got the device {device}; memory is counted on cpu and cuda.")
    return kind == "cuda"


def current(device: torch.device | str = "cpu") -> int:
    """Return the bytes in use now.

    For the CPU, raises RuntimeError before counting begins; so do the other functions that return numbers.
    """
    if _is_cuda(device):
        return torch.cuda.memory_allocated(device)
    return sum(by_category().values())


def peak(device: torch.device | str = "cpu") -> int:
    """Return the most bytes in use at once since counting began or the last `reset_peak()`."""
    if _is_cuda(device):
        return torch.cuda.max_memory_allocated(device)
    return sum(by_category(at="peak").values())


def reserved(device: torch.device | str = "cpu") -> int:
    """Return the bytes that torch's caching allocator for CUDA has reserved now; for the CPU, return `current()`."""
    return torch.cuda.memory_reserved(device) if _is_cuda(device) else current()


def peak_reserved(device: torch.device | str = "cpu") -> int:
    """Return the largest value of `reserved` since counting began or the last `reset_peak()`."""
    return torch.cuda.max_memory_reserved(device) if _is_cuda(device) else peak()


def by_category(at: Literal["now", "peak"] = "now") -> dict[str, int]:
    """Return the bytes of CPU tensors by category, now or at the peak; their sum is `current()` or `peak()`."""
    _check_tracking()
    if at not in ("now", "peak"):
        raise ValueError(f"got at={at!r}; pass 'now' or 'peak'.")
    return source().current() if at == "now" else source().peak()


def reset_peak(device: torch.device | str = "cpu") -> None:
    """Reset the peak to the bytes in use now; for CPU memory, also drop all phases but the current one."""
    if _is_cuda(device):
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _check_tracking()
        source().reset_peak()


def num_allocations() -> int:
    """Return the number of CPU allocations since counting began."""
    _check_tracking()
    return _memory.num_allocations()


def timeline() -> list[Phase]:
    """Return the phases since counting began, the current one last; at most the newest 4096.

    `reset_peak()` drops all phases but the current one.
    """
    _check_tracking()
    return [Phase(*phase) for phase in source().phases()]


def begin_phase(name: str, category: str = "other") -> None:
    """Begin a phase of the timeline; memory allocated in the phase has `category` until `tag` changes it.

    Does nothing if memory is not counted; else a category outside of CATEGORIES raises ValueError.
    """
    if is_tracking():
        source().begin_phase(name, category)


def tag(tensors: Iterable[torch.Tensor | None], category: str) -> None:
    """Set the category of the tensors' memory, also in the recorded peaks that include this memory.

    For a DTensor, tags this rank's shard. Does nothing if memory is not counted; else a category outside of CATEGORIES
    raises ValueError.
    """
    if not is_tracking():
        return
    for tensor in tensors:
        if tensor is not None:
            source().set_category(getattr(tensor, "_local_tensor", tensor), category)
