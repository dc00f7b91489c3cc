"""Records the calls on tensors without values, in program order, to replay them later."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Storage = int


def storage_of(tensor: Tensor) -> Storage:
    """Return the identity of a meta tensor's storage, valid while the storage lives: a tape keeps it alive."""
    storage: Storage = tensor.untyped_storage()._cdata
    return storage


@dataclass(frozen=True)
class RandomState:
    """A generator, and its state before a call drew from it."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True)
class Entry:
    """One call. Meta tensors of the same shapes represent the tensors without values.

    Attributes:
        writes: storages that the call creates or changes.
        versions: the tensor arguments with values, each with its version; they must not change until the replay.
        random: the generator that the call draws from, with its state before the call; None: the call is not random.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    writes: frozenset[Storage]
    versions: tuple[tuple[Tensor, int], ...] = ()
    random: RandomState | None = None

    def check_versions(self) -> None:
        """Raise RuntimeError if a tensor with values that the call read has been changed since."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"deferred_init: {self.function} read a tensor of shape {tuple(tensor.shape)} that has been "
                    "changed since; build that module outside of deferred_init, or give it a copy of the tensor, "
                    "and do not use the model before weft.parallelize."
                )

    def reads(self) -> set[Storage]:
        return {storage_of(tensor) for tensor in meta_tensors(self.args, self.kwargs)}

    def tensors(self) -> list[Tensor]:
        """Return the meta tensors among the arguments and results."""
        return meta_tensors(self.args, self.kwargs, self.result)


def meta_tensors(*trees: Any) -> list[Tensor]:
    """Return the meta tensors in nested arguments or results.

    pytree would take ten times as long, and a model's calls are thousands.
    """
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            if tree.is_meta:
                found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += meta_tensors(*tree)
        elif isinstance(tree, dict):
            found += meta_tensors(*tree.values())
    return found


class Tape:
    """All calls inside one `deferred_init`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._entries_of: dict[Storage, list[int]] = {}
        self._lock = threading.Lock()  # code that loads files records calls in threads of its own
        # Storages whose values were read, each with a real tensor of its values; all later calls on it are executed.
        self.materialized: dict[Storage, Tensor] = {}

    def record(self, entry: Entry) -> None:
        """Append a call."""
        with self._lock:
            for storage in entry.writes | {storage_of(tensor) for tensor in meta_tensors(entry.result)}:
                self._entries_of.setdefault(storage, []).append(len(self.entries))
            self.entries.append(entry)

    def entries_of(self, storage: Storage) -> list[Entry]:
        """Return the calls that created, changed or viewed a storage."""
        return [entry for _, entry in self.indexed_entries_of(storage)]

    def indexed_entries_of(self, storage: Storage) -> list[tuple[int, Entry]]:
        """Return the calls of `entries_of`, each with its index in program order."""
        return [(index, self.entries[index]) for index in self._entries_of.get(storage, ())]

    def producer_of(self, meta: Tensor) -> Entry | None:
        """Return the call that made a tensor: the one that created its storage, or the one that made this view."""
        for entry in self.entries_of(storage_of(meta)):
            if any(each is meta for each in meta_tensors(entry.result)):
                return entry
        return None

    def needed(self, storages: Iterable[Storage]) -> list[Entry]:
        """Return the calls on which the values in storages depend, in program order."""
        needed: set[int] = set()
        seen: set[Storage] = set()
        open_storages = set(storages)
        while open_storages:
            storage = open_storages.pop()
            seen.add(storage)
            for index in self._entries_of.get(storage, ()):
                if index not in needed:
                    needed.add(index)
                    open_storages |= self.entries[index].reads() - seen
        return [self.entries[index] for index in sorted(needed)]

    def replay(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the full values of meta tensors; tensors that share a storage also share one afterwards.

        Raises:
            RuntimeError: a tensor with values that a call read has been changed since.
        """
        wanted = list(tensors)
        entries = self.needed(storage_of(tensor) for tensor in wanted)
        last_use = {id(meta): index for index, entry in enumerate(entries) for meta in entry.tensors()}
        last_use |= dict.fromkeys(map(id, wanted), len(entries))
        values: dict[int, Tensor] = {}  # by the identity of the meta tensor
        for index, entry in enumerate(entries):
            _execute(entry, values)
            for meta in entry.tensors():
                if last_use[id(meta)] == index:
                    values.pop(id(meta), None)
        return [values[id(tensor)] for tensor in wanted]


def _execute(entry: Entry, values: dict[int, Tensor]) -> None:
    """Make a recorded call on `values`, tensors by the identity of their meta tensors, and add its results to them.

    Raises:
        RuntimeError: as `Tape.replay`.
    """
    entry.check_versions()

    def value_of(leaf: Any) -> Any:
        return values[id(leaf)] if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    args, kwargs = tree_map(value_of, (entry.args, entry.kwargs))
    with drawing_from(entry.random):
        result = entry.function(*args, **kwargs)
    for meta, value in zip(meta_tensors(entry.result), _tensors(result, entry.result), strict=True):
        values[id(meta)] = value


def _tensors(result: Any, like: Any) -> list[Tensor]:
    """Return the tensors in `result` at the positions of meta tensors in `like`, which has the same structure."""
    pairs = zip(tree_leaves(result), tree_leaves(like), strict=True)
    return [value for value, meta in pairs if isinstance(meta, Tensor) and meta.is_meta]


class drawing_from:
    """Inside, a generator draws from a recorded state; afterwards it continues from its previous state."""

    def __init__(self, random: RandomState | None) -> None:
        self._random = random

    def __enter__(self) -> None:
        if self._random is not None:
            self._previous = self._random.generator.get_state()
            self._random.generator.set_state(self._random.state)

    def __exit__(self, *_: object) -> None:
        if self._random is not None:
            self._random.generator.set_state(self._previous)
