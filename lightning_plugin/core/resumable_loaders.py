"""Lets the training loaders of a resumed run go on after the batch of the checkpoint.

Lightning asks each loader that has `state_dict` for its position, and torch's DataLoader has none. A resumable loader
counts the batches that it has given. In a resumed run, the first iteration takes as many batches of indices from the
sampler as the loader had given, without loading their samples: it *replays* the sampler. A sampler that shuffles draws
from a random generator when an iteration begins: torch's default one, or its own. So a position within an epoch has the
state at the start of the epoch, and a position at its end the current state of the sampler's own generator.

All ranks load the position of the first rank: positions of data-parallel ranks are equal. With another number of
data-parallel ranks, the position is converted by the samples of a step over all ranks, so that a job whose steps have
as many samples as before goes on with the next ones.

Lightning's checkpoints have the positions in "combined_loader", and a stock Trainer raises an error for positions of
loaders that have none there. So a checkpoint has the positions of loaders that weft has made resumable under a key of
its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from weft._plugin.loader_check import without_lockstep

KEY = "weft_loaders"
_LOOP, _LOADERS = "state_dict", "combined_loader"

_classes: dict[type, type] = {}  # the resumable class of a user's class


class ResumableLoader(DataLoader[Any]):
    """A loader of a map-style dataset that counts its batches; made from the user's loader by `make_resumable`."""

    # Defaults for loaders that Lightning makes again from such a loader.
    _weft_num_data_ranks = 1
    _weft_given = 0  # batches of the iteration, those of the run before included
    _weft_skipped = 0  # batches at the start of the next iteration
    _weft_is_resumed = False  # a position was loaded, from which the next iteration begins
    _weft_random_state: Tensor | None = None  # at the start of the iteration

    @property
    def _index_sampler(self) -> Any:
        return _Replayed(self, super()._index_sampler)

    def __iter__(self) -> Any:
        self._weft_given = self._weft_skipped
        # Workers take indices at once, and Lightning sets the epoch of the sampler after it has made the iterator of a
        # resumed run.
        begins_later, self._weft_is_resumed = self._weft_is_resumed, False
        return _Counted(self, super().__iter__, begins_later)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: that of the next epoch's start after the last batch."""
        return self.position(is_at_end=self._weft_given >= len(self))

    def position(self, is_at_end: bool) -> dict[str, Any]:
        """Return the position in the epoch, or that of the next epoch's start."""
        num_batches, random_state = self._weft_given, self._weft_random_state
        if is_at_end:
            own = _own_generator(self)
            num_batches, random_state = 0, None if own is None else own.get_state()
        return {
            "num_batches": num_batches,
            "batch_size": self.batch_size,
            "num_data_ranks": self._weft_num_data_ranks,
            "random_state": random_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a position.

        Raises:
            ValueError: no number of batches of this run has the samples that the run before has used.
        """
        self._weft_skipped = _converted(state, self.batch_size, self._weft_num_data_ranks)
        self._weft_given = self._weft_skipped
        self._weft_is_resumed = True
        self._weft_random_state = state["random_state"]
        own = _own_generator(self)
        if own is not None and self._weft_random_state is not None:
            own.set_state(self._weft_random_state)


def _own_generator(loader: ResumableLoader) -> torch.Generator | None:
    """Return the generator that was given to the sampler; None: it draws from torch's default one, or not at all."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    generator = getattr(getattr(sampler, "sampler", sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _converted(state: dict[str, Any], batch_size: int | None, num_data_ranks: int) -> int:
    """Return the number of batches of this run that have the samples of a position."""
    num_batches = int(state["num_batches"])
    if (state["batch_size"], state["num_data_ranks"]) == (batch_size, num_data_ranks) or num_batches == 0:
        return num_batches
    if state["batch_size"] is not None and batch_size is not None:
        num_samples = num_batches * state["batch_size"] * state["num_data_ranks"]
        if num_samples % (batch_size * num_data_ranks) == 0:
            return int(num_samples // (batch_size * num_data_ranks))
    raise ValueError(
        f"the checkpoint was saved after {num_batches} batches of an epoch, of batch_size={state['batch_size']} on "
        f"{state['num_data_ranks']} data-parallel ranks, and the loader has batch_size={batch_size} on "
        f"{num_data_ranks}, of which no number of batches has as many samples; keep the product of both, or resume "
        "from a checkpoint of an epoch's end."
    )


class _Counted:
    """The iterator of a loader, which counts. `begins_later`: it begins with its first batch."""

    def __init__(self, loader: ResumableLoader, begin: Callable[[], Iterator[Any]], begins_later: bool) -> None:
        self._loader = loader
        self._begin = begin
        self._batches = None if begins_later else begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        batch = next(self._batches)
        self._loader._weft_given += 1
        return batch

    def __len__(self) -> int:
        return len(self._loader)


class _Replayed:
    """A sampler that leaves out what the loader skips, and records the state of its random generator."""

    def __init__(self, loader: ResumableLoader, sampler: Any) -> None:
        self._loader = loader
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        loader, sampler = self._loader, self._sampler
        generator = _own_generator(loader) or torch.default_generator
        num_skipped, loader._weft_skipped = loader._weft_skipped, 0
        if num_skipped == 0 or loader._weft_random_state is None:
            loader._weft_random_state = generator.get_state()
            yield from itertools.islice(sampler, num_skipped, None)
            return
        current = generator.get_state()
        generator.set_state(loader._weft_random_state)
        indices = iter(sampler)
        for _ in range(num_skipped):
            next(indices, None)
        if generator is torch.default_generator:
            generator.set_state(current)
        yield from indices


def make_resumable(loader: Any, num_data_ranks: int) -> Any:
    """Make a DataLoader of a map-style dataset resumable, unless it has a state of its own; return it."""
    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_map_style and not hasattr(loader, "state_dict") and loader._iterator is None:
        cls = type(loader)
        made = _classes.setdefault(cls, type(cls.__name__, (ResumableLoader, cls), {"__module__": cls.__module__}))
        loader.__class__ = made
    if isinstance(loader, ResumableLoader):
        loader._weft_num_data_ranks = num_data_ranks
    return loader


def move_states_out(checkpoint: dict[str, Any], loaders: Any) -> None:
    """Move the positions of all loaders to `KEY` if weft has made one resumable; a stock Trainer reads the others.

    After the last batch of an epoch, which may have fewer batches than a loader (`limit_train_batches`), the positions
    are those of the next epoch's start.

    `loaders`: the Trainer's training loaders, nested as the user has given them.
    """
    loaders = [without_lockstep(loader) for loader in pytree.tree_leaves(loaders)]
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    state = loop.get(_LOOP, {})
    if not any(isinstance(loader, ResumableLoader) for loader in loaders) or _LOADERS not in state:
        return
    checkpoint[KEY] = positions = state.pop(_LOADERS)
    stateful = [loader for loader in loaders if hasattr(loader, "state_dict")]
    if loop["epoch_loop.batch_progress"]["is_last_batch"]:
        for idx, loader in enumerate(stateful):
            if isinstance(loader, ResumableLoader):
                positions[idx] = loader.position(is_at_end=True)
    others = [
        position
        for loader, position in zip(stateful, positions, strict=True)
        if not isinstance(loader, ResumableLoader)
    ]
    if others:
        state[_LOADERS] = others


def move_states_in(checkpoint: dict[str, Any]) -> None:
    """Undo `move_states_out` in a loaded checkpoint."""
    positions = checkpoint.pop(KEY, None)
    if positions is not None and "fit_loop" in checkpoint.get("loops", {}):
        checkpoint["loops"]["fit_loop"].setdefault(_LOOP, {})[_LOADERS] = positions
