"""Compares the numbers of batches of the ranks' data loaders.

A rank whose loader ends early leaves the other ranks of its group waiting in the next collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

UNKNOWN = -1  # an unknown length; lengths are gathered as integer tensors, which cannot contain None


class LoaderState(NamedTuple):
    """The state of one rank's loader, and the rank's place in the mesh.

    rank: the global rank.
    data_rank: the rank in the data group; ranks with equal data ranks get the same batches.
    pipeline_rank: the rank in the pipeline's group; 0 without a pipeline.
    numbers: the numbers to compare, such as a length; the caller defines their meaning.
    """

    rank: int
    data_rank: int
    pipeline_rank: int
    numbers: tuple[int, ...]


def loader_length(loader: Any) -> int:
    """Return the number of batches, or UNKNOWN."""
    try:
        return len(loader)
    # len() raises TypeError for an iterable data set without __len__; a user's __len__ may be left abstract.
    except (TypeError, NotImplementedError):
        return UNKNOWN


def has_reliable_length(loader: Any) -> bool:
    """Return whether a loader's length is known and correct; the length of an iterable data set may be wrong."""
    return loader_length(loader) != UNKNOWN and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def gather(state: LoaderState, groups: Iterable[dist.ProcessGroup], device: torch.device) -> list[LoaderState]:
    """Return the states of all ranks of the mesh whose axes are `groups`, sorted by rank.

    Collective over each group in turn: all ranks pass equally many numbers.
    """
    values = torch.tensor(
        [state.rank, state.data_rank, state.pipeline_rank, *state.numbers], dtype=torch.int64, device=device
    )
    num_values = values.numel()
    for group in groups:
        if group.size() > 1:
            gathered = values.new_empty(group.size() * values.numel())
            dist.all_gather_into_tensor(gathered, values, group=group)
            values = gathered
    rows = values.view(-1, num_values).tolist()
    return sorted(LoaderState(rank, data_rank, stage, tuple(numbers)) for rank, data_rank, stage, *numbers in rows)


def check_equal_states(
    states: Sequence[LoaderState],
    exchanged: str | None,
    describe: Callable[[tuple[int, ...]], str],
    loader_name: str,
    advice: str,
    key: Callable[[tuple[int, ...]], Any] = lambda numbers: numbers,
    same_data_kind: str = "tensor-parallel group",
) -> None:
    """Raise ValueError if ranks that run every batch together differ in `key` of their numbers.

    Such ranks are the ranks of a tensor-parallel or a context-parallel group, the stages of a pipeline and, if
    `exchanged` is not None, data-parallel ranks.

    Args:
        states: of all ranks that call this function, in the same order on each, so that all ranks raise or none does.
        exchanged: the tensors that data-parallel ranks exchange in every batch, such as "gradients"; None: they
            exchange nothing, and may differ.
        describe: returns a text that describes a rank's numbers, such as "has 5 batches".
        loader_name: the subject of the error, such as "the training loader".
        advice: the remedy in the error.
        key: returns the value that must be equal, from a rank's numbers; by default the numbers themselves.
        same_data_kind: the name of the kind of group whose ranks get the same batches.
    """
    reasons: list[tuple[Callable[[LoaderState], object], str]] = [
        (lambda s: (s.data_rank, s.pipeline_rank), f"the ranks of a {same_data_kind} must get the same batches"),
        (lambda s: s.data_rank, "the stages of a pipeline must get the same batches"),
    ]
    if exchanged is not None:
        reasons.append((lambda s: 0, f"data-parallel ranks exchange {exchanged} in every batch"))
    for group_of, reason in reasons:
        groups: dict[Any, list[LoaderState]] = {}
        for state in states:
            groups.setdefault(group_of(state), []).append(state)
        for members in groups.values():
            if len({key(state.numbers) for state in members}) > 1:
                raise ValueError(f"{loader_name} {_describe_groups(members, describe)}, but {reason}; {advice}.")


def _describe_groups(members: Sequence[LoaderState], describe: Callable[[tuple[int, ...]], str]) -> str:
    """Return a text that describes the members; ranks with equal descriptions are listed together."""
    by_text: dict[str, list[int]] = {}
    for state in members:
        by_text.setdefault(describe(state.numbers), []).append(state.rank)
    return " and ".join(f"{text} on {_list_ranks(ranks)}" for text, ranks in by_text.items())


def _list_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def describe_length(numbers: tuple[int, ...]) -> str:
    """Return a text that states a loader's length, the first of `numbers`."""
    length = numbers[0]
    return "has no length" if length == UNKNOWN else f"has {length} batch{'es' * (length != 1)}"


def describe_next(numbers: tuple[int, ...]) -> str:
    """Return a text that states whether a loader has another batch; the first of `numbers` is 1 if so."""
    return "has another batch" if numbers[0] else "has ended"


class LockstepLoader:
    """Wraps a loader: before each batch, the ranks check that either all of them or none have another batch.

    In all else it acts as the wrapped loader: its attributes are those of `loader`.

    Args:
        loader: the wrapped loader.
        make_check: called when an iteration over the loader starts. Returns a collective function, which gets whether
            this rank has another batch and raises if ranks differ; or None, for an iteration without checks.
    """

    __slots__ = ("_weft_loader", "_weft_make_check", "_weft_state")

    def __init__(self, loader: Any, make_check: Callable[[], Callable[[bool], None] | None]) -> None:
        object.__setattr__(self, "_weft_loader", loader)
        object.__setattr__(self, "_weft_make_check", make_check)

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
        check_next = self._weft_make_check()
        batches = self._begin()
        return batches if check_next is None else _checked(batches, check_next)

    def _begin(self) -> Iterator[Any]:
        return iter(self._weft_loader)


class _StatefulLockstepLoader(LockstepLoader):
    """Defines the methods of stateful loaders on the class.

    Lightning uses `isinstance` with a runtime-checkable protocol, which since Python 3.12 ignores `__getattr__`.
    """

    __slots__ = ()

    def state_dict(self) -> Any:
        return self._weft_loader.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self._weft_loader.load_state_dict(state)


class RecordingLoader(_StatefulLockstepLoader):
    """Keeps the state that the loader had before the batch that it has given last."""

    __slots__ = ()

    def state_before_last_batch(self) -> Any:
        """Return that state; before the first batch, the loader's own."""
        return getattr(self, "_weft_state", None) or self.state_dict()

    def _begin(self) -> Iterator[Any]:
        return self._recording(iter(self._weft_loader))

    def _recording(self, batches: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            object.__setattr__(self, "_weft_state", copy.deepcopy(self.state_dict()))
            batch = next(batches, end)
            if batch is end:
                return
            yield batch


def in_lockstep(
    loader: Any, make_check: Callable[[], Callable[[bool], None] | None], records: bool = False
) -> LockstepLoader:
    """Return a LockstepLoader around a loader, which is stateful if the loader is.

    records: a stateful loader becomes a RecordingLoader.
    """
    if not is_stateful(loader):
        return LockstepLoader(loader, make_check)
    return (RecordingLoader if records else _StatefulLockstepLoader)(loader, make_check)


def is_stateful(loader: Any) -> bool:
    """Return whether a loader has a state of its own, which Lightning saves."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def without_lockstep(loader: Any) -> Any:
    """Return the loader that a LockstepLoader of an earlier run wraps, or else `loader` itself."""
    return loader._weft_loader if isinstance(loader, LockstepLoader) else loader


def _checked(batches: Iterator[Any], check_next: Callable[[bool], None]) -> Iterator[Any]:
    end = object()
    while True:
        batch = next(batches, end)
        check_next(batch is not end)  # one line for both cases, so that ranks that raise here have equal tracebacks
        if batch is end:
            return
        yield batch
