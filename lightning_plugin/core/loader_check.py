"""Compares the numbers of batches of the ranks' data loaders.

A rank whose loader ends early leaves the other ranks of its group waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

UNKNOWN = -1  # a length


class Reading(NamedTuple):
    """The numbers of one rank and its coordinates; ranks with equal data ranks get the same batches."""

    rank: int
    data_rank: int
    stage: int
    numbers: tuple[int, ...]


def loader_length(loader: Any) -> int:
    """Return the number of batches, or UNKNOWN."""
    try:
        return len(loader)
    # len() raises TypeError for an iterable data set without __len__; a user's __len__ may be left abstract.
    except (TypeError, NotImplementedError):
        return UNKNOWN


def has_reliable_length(loader: Any) -> bool:
    """Return whether a loader's length is reliable: that of an iterable data set may be wrong."""
    return loader_length(loader) != UNKNOWN and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def gather(reading: Reading, groups: Iterable[dist.ProcessGroup], device: torch.device) -> list[Reading]:
    """Return the readings of all ranks of the product of `groups`; collective over each of them in turn."""
    values = torch.tensor(
        [reading.rank, reading.data_rank, reading.stage, *reading.numbers], dtype=torch.int64, device=device
    )
    width = values.numel()
    for group in groups:
        if group.size() > 1:
            gathered = values.new_empty(group.size() * values.numel())
            dist.all_gather_into_tensor(gathered, values, group=group)
            values = gathered
    rows = values.view(-1, width).tolist()
    return sorted(Reading(rank, data_rank, stage, tuple(numbers)) for rank, data_rank, stage, *numbers in rows)


def check_equal_readings(
    readings: Sequence[Reading],
    data_ranks_exchange: str | None,
    describe: Callable[[tuple[int, ...]], str],
    loader: str,
    advice: str,
    key: Callable[[tuple[int, ...]], Any] = lambda numbers: numbers,
) -> None:
    """Raise ValueError if ranks that run every batch together differ in the `key` of their numbers.

    Args:
        readings: of all ranks that call this, in one order, so that either all ranks raise or none.
        data_ranks_exchange: the tensors that data-parallel ranks exchange in every batch; None: they may differ.
        describe: returns the state of a rank's loader, such as "has 5 batches".
        loader: the subject of the error, such as "the training loader".
        advice: the remedy in the error.
    """
    reasons: list[tuple[Callable[[Reading], object], str]] = [
        (lambda r: (r.data_rank, r.stage), "the ranks of a tensor-parallel group must get the same batches"),
        (lambda r: r.data_rank, "the stages of a pipeline must get the same batches"),
    ]
    if data_ranks_exchange is not None:
        reasons.append((lambda r: 0, f"data-parallel ranks exchange {data_ranks_exchange} in every batch"))
    for group_of, reason in reasons:
        groups: dict[Any, list[Reading]] = {}
        for reading in readings:
            groups.setdefault(group_of(reading), []).append(reading)
        for members in groups.values():
            if len({key(reading.numbers) for reading in members}) > 1:
                raise ValueError(f"{loader} {_parties(members, describe)}, but {reason}; {advice}.")


def _parties(members: Sequence[Reading], describe: Callable[[tuple[int, ...]], str]) -> str:
    by_text: dict[str, list[int]] = {}
    for reading in members:
        by_text.setdefault(describe(reading.numbers), []).append(reading.rank)
    return " and ".join(f"{text} on {_ranks(ranks)}" for text, ranks in by_text.items())


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def describe_length(numbers: tuple[int, ...]) -> str:
    """Return a text on a loader's length, the first of its numbers."""
    length = numbers[0]
    return "has no length" if length == UNKNOWN else f"has {length} batch{'es' * (length != 1)}"


def describe_next(numbers: tuple[int, ...]) -> str:
    """Return a text on whether a loader has another batch; the first number is 1 if so."""
    return "has another batch" if numbers[0] else "has ended"


class LockstepLoader:
    """A loader whose ranks agree before each batch that all have one; otherwise it acts as the wrapped loader.

    Args:
        loader: reading or setting an attribute of this object reads or sets that of `loader`.
        begin: called at the start of each iteration. Returns a collective function that takes whether this rank has
            another batch and raises if ranks differ; or None: this iteration needs no comparison.
    """

    __slots__ = ("_weft_begin", "_weft_loader")

    def __init__(self, loader: Any, begin: Callable[[], Callable[[bool], None] | None]) -> None:
        object.__setattr__(self, "_weft_loader", loader)
        object.__setattr__(self, "_weft_begin", begin)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # Fabric's own wrapper copies it
        attributes: dict[str, Any] = vars(self._weft_loader)
        return attributes

    def __getattr__(self, name: str) -> Any:
        if name in LockstepLoader.__slots__:  # before __init__ sets it
            raise AttributeError(name)
        return getattr(self._weft_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._weft_loader, name, value)

    def __len__(self) -> int:
        return len(self._weft_loader)

    def __iter__(self) -> Iterator[Any]:
        agree = self._weft_begin()
        batches = iter(self._weft_loader)
        return batches if agree is None else _in_agreement(batches, agree)


class _StatefulLockstepLoader(LockstepLoader):
    """Has the methods of stateful loaders, which Lightning looks up on the class."""

    __slots__ = ()

    def state_dict(self) -> Any:
        return self._weft_loader.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self._weft_loader.load_state_dict(state)


def in_lockstep(loader: Any, begin: Callable[[], Callable[[bool], None] | None]) -> LockstepLoader:
    """Return the loader as a LockstepLoader, which is stateful if the loader is."""
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (_StatefulLockstepLoader if is_stateful else LockstepLoader)(loader, begin)


def without_lockstep(loader: Any) -> Any:
    """Return the loader that an earlier run has wrapped, or the loader itself."""
    return loader._weft_loader if isinstance(loader, LockstepLoader) else loader


def _in_agreement(batches: Iterator[Any], agree: Callable[[bool], None]) -> Iterator[Any]:
    end = object()
    while True:
        batch = next(batches, end)
        agree(batch is not end)  # one line for both cases, so that ranks that raise here have equal tracebacks
        if batch is end:
            return
        yield batch
