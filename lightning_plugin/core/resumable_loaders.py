"""Lets the training loaders of a resumed run go on after the batch of the checkpoint.

torch's DataLoader has no position. A resumable loader counts the batches that it has given. In a resumed run, the first
iteration takes as many batches of indices from the sampler as the loader had given, without loading their samples: it
*replays* the sampler. A sampler that shuffles draws from a random generator when an iteration begins: torch's default
one, or its own. So a position within an epoch has the state at the start of the epoch, and a position at its end the
current state of the sampler's own generator.

Numbers of batches are equal on all data-parallel ranks. A job with another number of data-parallel ranks whose steps
have as many samples over all ranks goes on with the next samples. If steps have other numbers of samples, Lightning's
counts of batches do not fit the loader, and it begins with its first batch.

A checkpoint has the positions under a key of weft's own. Lightning's state of loaders stays as it is: a stock Trainer
raises an error for positions of loaders that have none there.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from weft._plugin.loader_check import UNKNOWN, loader_length, without_lockstep

KEY = "weft_loaders"

_classes: dict[type, type] = {}  # the resumable class of a user's class


@dataclass
class _Progress:
    """The progress of an iteration. A loader keeps it, and not the iterator, whose workers end with it.

    num_given: batches, those of the run before included.
    num_skipped: batches at the start that are left out.
    random_state: of the sampler's generator at the start of the epoch; bytes, which are no memory of tensors.
    """

    num_given: int = 0
    num_skipped: int = 0
    random_state: bytes | None = None
    before_first_batch: Callable[[], object] | None = None  # None: not resumed


class ResumableLoader(DataLoader[Any]):
    """A loader of a map-style dataset that counts its batches; made from the user's loader by `make_resumable`."""

    # Defaults for loaders that Lightning makes again from such a loader.
    _weft_num_data_ranks = 1
    _weft_loaded: _Progress | None = None  # of the next iteration
    _weft_current: _Progress | None = None  # of the iteration that has given a batch last
    _weft_beginning: _Progress | None = None

    @property
    def _index_sampler(self) -> Any:
        return _Replayed(self, super()._index_sampler)

    def __iter__(self) -> Any:
        progress, self._weft_loaded = self._weft_loaded or _Progress(), None
        return _Iteration(self, super().__iter__, progress)

    def position(self, is_at_end: bool, max_batches: int, iteration: _Iteration | None = None) -> dict[str, Any]:
        """Return the position in the epoch, or that of the next epoch's start.

        max_batches: those that have been used; one more may have been given.
        iteration: the training's; None: the one that has given a batch last.
        """
        progress = self._weft_current or self._weft_loaded or _Progress()
        if iteration is not None:
            progress = iteration.progress
        num_batches, random_state = progress.num_given, progress.random_state
        if is_at_end:
            own = _own_generator(self)
            num_batches, random_state = 0, None if own is None else _state_of(own)
        return {
            "num_batches": min(num_batches, max_batches),
            "batch_size": self.batch_size,
            "num_data_ranks": self._weft_num_data_ranks,
            "random_state": None if random_state is None else _tensor_of(random_state),
        }

    def resume(self, position: dict[str, Any], before_first_batch: Callable[[], object]) -> str | None:
        """Let the next iteration begin at a position; return why it begins at its first batch instead, or None.

        before_first_batch: called after the iteration has begun, and before it gives a batch within an epoch.
        """
        num_batches, random_state = int(position["num_batches"]), position["random_state"]
        if num_batches > 0 and not _has_equal_steps(position, self.batch_size, self._weft_num_data_ranks):
            return (
                f"the checkpoint was saved within an epoch, with batch_size={position['batch_size']} on "
                f"{position['num_data_ranks']} data-parallel ranks, and this run has batch_size={self.batch_size} on "
                f"{self._weft_num_data_ranks}"
            )
        own = _own_generator(self)
        if own is not None and random_state is not None:
            own.set_state(random_state)
        self._weft_current = None
        state = None if random_state is None else random_state.numpy().tobytes()
        self._weft_loaded = _Progress(num_batches, num_batches, state, before_first_batch)
        return None


class _Iteration:
    """The iterator of a loader."""

    def __init__(self, loader: ResumableLoader, begin: Callable[[], Iterator[Any]], progress: _Progress) -> None:
        self._loader = loader
        self._begin = begin
        self.progress = progress
        self._batches: Iterator[Any] | None = None
        # Workers take indices at once, and Lightning sets the epoch of the sampler after it has made the iterator of a
        # resumed run: that one begins with its first batch.
        if progress.before_first_batch is None:
            self._batches = self._start()

    def _start(self) -> Iterator[Any]:
        """Begin; within an epoch, without drawing numbers that the run before has drawn at the epoch's start."""
        state = torch.get_rng_state() if self.progress.num_skipped > 0 else None
        self._loader._weft_beginning = self.progress
        try:
            return self._begin()
        finally:
            self._loader._weft_beginning = None
            if state is not None:
                torch.set_rng_state(state)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._start()
            if self.progress.before_first_batch is not None and self.progress.num_skipped > 0:
                self.progress.before_first_batch()
        batch = next(self._batches)
        self.progress.num_given += 1
        self._loader._weft_current = self.progress
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def __reduce__(self) -> Any:  # a copy of a loader has no iterator
        return iter, ([],)


class _Replayed:
    """A sampler that leaves out what an iteration skips, and records the state of its random generator."""

    def __init__(self, loader: ResumableLoader, sampler: Any) -> None:
        self._loader = loader
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        progress = self._loader._weft_beginning
        return iter(self._sampler) if progress is None else self._indices(progress)

    def _indices(self, progress: _Progress) -> Iterator[Any]:
        generator = _own_generator(self._loader) or torch.default_generator
        if progress.num_skipped == 0 or progress.random_state is None:
            progress.random_state = _state_of(generator)
            yield from itertools.islice(self._sampler, progress.num_skipped, None)
            return
        current = generator.get_state()
        generator.set_state(_tensor_of(progress.random_state))
        indices = iter(self._sampler)
        for _ in range(progress.num_skipped):
            next(indices, None)
        if generator is torch.default_generator:
            generator.set_state(current)
        yield from indices


def _state_of(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy().tobytes())


def _tensor_of(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _own_generator(loader: ResumableLoader) -> torch.Generator | None:
    """Return the generator that was given to the sampler; None: it draws from torch's default one, or not at all."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    # Lightning wraps a sampler that does not split the data among ranks.
    sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _has_equal_steps(position: dict[str, Any], batch_size: int | None, num_data_ranks: int) -> bool:
    """Return whether a step has as many samples as in the run of a position."""
    if batch_size is None or position["batch_size"] is None:
        return bool((position["batch_size"], position["num_data_ranks"]) == (batch_size, num_data_ranks))
    return bool(position["batch_size"] * position["num_data_ranks"] == batch_size * num_data_ranks)


def make_resumable(loader: Any, num_data_ranks: int) -> Any:
    """Return a resumable copy of a DataLoader of a map-style dataset, or `loader` if it cannot be one.

    A loader that has a position of its own, no length, or an iteration of its own is not changed.
    """
    if not isinstance(loader, ResumableLoader):
        cls = type(loader)
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset)
            or hasattr(loader, "state_dict")
            or loader._iterator is not None
            or any(getattr(cls, name) is not getattr(DataLoader, name) for name in ("__iter__", "__len__"))
            or cls._index_sampler is not DataLoader._index_sampler
            or loader_length(loader) == UNKNOWN
        ):
            return loader
        made = _classes.setdefault(cls, type(cls.__name__, (ResumableLoader, cls), {"__module__": cls.__module__}))
        loader = copy.copy(loader)
        loader.__class__ = made
    loader._weft_num_data_ranks = num_data_ranks
    return loader


def positions(checkpoint: dict[str, Any], trainer: Any) -> list[dict[str, Any] | None]:
    """Return the positions of all training loaders for a Trainer's checkpoint; None: a loader is not resumable.

    After the last batch of an epoch, which may have fewer batches than a loader (`limit_train_batches`), the positions
    are those of the next epoch's start.

    Args:
        checkpoint: its state of Lightning's loops is read.
        trainer: of the training loaders.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return []
    is_at_end, num_used = progress["is_last_batch"], progress["current"]["ready"]
    leaves = [without_lockstep(loader) for loader in pytree.tree_leaves(trainer.train_dataloader)]
    # Lightning's own iterators: a callback may have made others of the same loaders.
    combined = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "_iterator", None)
    iterators = list(getattr(combined, "iterators", ()))
    found: list[dict[str, Any] | None] = []
    for loader, iterator in itertools.zip_longest(leaves, iterators[: len(leaves)]):
        iteration = iterator if isinstance(iterator, _Iteration) else None
        is_resumable = isinstance(loader, ResumableLoader)
        found.append(loader.position(is_at_end, num_used, iteration) if is_resumable else None)
    return found
