"""Checkpoints of a model in shards or stages: a directory of shards, or one file in the format of any Trainer.

`weft.strategy.checkpoint` writes and reads directories. The keys of the sharded state are "model" and "optimizer_0",
... (not "state_dict", the model's key in directories of Lightning's ModelParallelStrategy); under Fabric, they are the
keys of the user's state. A Trainer's directory also has "random_states". An optimizer without state is saved with the
other entries, because torch.distributed.checkpoint drops empty dictionaries.

All ranks must call the functions that save or load, except `write_file`.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft._plugin.averaged_entries import take_entries
from weft._plugin.optimizer_state import FullModel, load_sharded_state, load_state, rekey_by_name
from weft._plugin.random_states import RandomStates
from weft._plugin.saves import join_at_exit
from weft.strategy import checkpoint as directories
from weft.strategy.checkpoint import Checkpoint, Where, background
from weft.strategy.checkpoint.local import LocalLocation
from weft.strategy.checkpoint.manifest import has_manifest

# The model's key in a Trainer's directory, as weft's strategy and as Lightning's ModelParallelStrategy write it.
MODEL_KEYS = ("model", "state_dict")


def optimizer_key(idx: int) -> str:
    """Return the name of the idx-th optimizer in a directory of shards."""
    return f"optimizer_{idx}"


def without_none(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None; for example, Lightning 2.5 has no argument `weights_only`."""
    return {name: value for name, value in arguments.items() if value is not None}


@contextmanager
def explaining_added_entries(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `get_model_state_dict` of torch raises a ValueError that names an entry that a state_dict hook has added.

    torch finds the module of each entry, and raises AttributeError for one that no module has.
    """
    try:
        yield
    except AttributeError as error:
        added = next((name for name in model.state_dict() if not _has_entry(model, name)), None)
        if added is None:
            raise
        raise ValueError(
            f"the state dict of the model has {added!r}, which a hook has added and no module has; a "
            "checkpoint has shards of parameters and buffers only; add it in on_save_checkpoint, or make it a buffer."
        ) from error


def _has_entry(model: torch.nn.Module, name: str) -> bool:
    value: Any = model
    for part in name.split("."):
        if part == "_extra_state":
            return True
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def save_directory(
    checkpoint: dict[str, Any],
    path: Where,
    pipeline_group: dist.ProcessGroup | None = None,
    about: dict[str, Any] | None = None,
    background_seconds: float | None = None,
    random_states: RandomStates | None = None,
) -> None:
    """Write a Trainer's `checkpoint`, in which "state_dict" and "optimizer_states" hold DTensors, as a directory.

    `pipeline_group`: the ranks that hold the stages of the model; None: the model has no stages. `random_states` are
    saved with the optimizers, not with weights only. See `write_directory`.
    """
    rest = dict(checkpoint)
    states = rest.pop("optimizer_states", [])
    optimizers = {optimizer_key(idx): state for idx, state in enumerate(states)}
    models = {"model": rest.pop("state_dict"), **take_entries(rest)}
    if optimizers and random_states is not None:
        models |= random_states.to_save()
    write_directory(models, optimizers, rest, path, pipeline_group, about, background_seconds)


def write_directory(
    models: dict[str, Any],
    optimizers: dict[str, dict[str, Any]],
    rest: dict[str, Any],
    path: Where,
    pipeline_group: dist.ProcessGroup | None = None,
    about: dict[str, Any] | None = None,
    background_seconds: float | None = None,
) -> None:
    """Write state dicts of DTensors and, from the first rank, `rest`, as the directory or URL `path`.

    The files are written under other names. When they are complete and stored durably, they take the place of a
    previous checkpoint at `path`: a crash at any moment leaves one of the two.

    Args:
        about: JSON that describes the run.
        background_seconds: write it in the background, where the first rank waits so long for the files of the others;
            None: the directory is complete when this function returns.

    Raises:
        Exception: with `background_seconds`, the save in the background before this one has failed; without, a warning
            says so.
    """
    background.wait(raises=background_seconds is not None)
    location = directories.location_of(path)
    check_checkpoint_path(location)
    written = directories.begin(location)
    keys_with_state = {key for key, state in optimizers.items() if state["state"]}
    if pipeline_group is not None:  # an optimizer has no state on a stage without trainable parameters
        gathered: list[Any] = [None] * pipeline_group.size()
        dist.all_gather_object(gathered, keys_with_state, group=pipeline_group)
        keys_with_state = set().union(*gathered)
    with_state = {key: state for key, state in optimizers.items() if key in keys_with_state}
    without_state = {key: state for key, state in optimizers.items() if key not in keys_with_state}
    state, others = {**models, **with_state}, {**rest, **without_state}
    if background_seconds is not None:
        join_at_exit()
        pickled = background.start(location, written, state, others, about or {}, background_seconds)
    else:
        pickled = directories.save(written, state, others, about or {})
    if pickled:
        warnings.warn(
            f"weft: the checkpoint {str(location)!r} has Python objects that JSON cannot carry "
            f"({', '.join(pickled[:10])}); it loads only with allow_pickle=True.",
            stacklevel=2,
        )
    if background_seconds is None:
        directories.publish(written, location)


def write_file(checkpoint: dict[str, Any], path: Where) -> None:
    """Write a checkpoint of plain tensors as the file `path`, as safe from crashes as a directory; not collective."""
    directories.location_of(path).write_file(functools.partial(torch.save, checkpoint))


def check_checkpoint_path(path: Where) -> None:
    """Raise IsADirectoryError if `path` is a directory that is not a checkpoint; for a URL collective."""
    location = directories.location_of(path)

    def check() -> None:
        if not directories.may_be_replaced(location):
            raise IsADirectoryError(
                f"the checkpoint path {str(location)!r} is a directory; pass another path, or remove it."
            )

    if location.is_local:
        check()
    else:
        directories.check_ranks(location)
        directories.on_all_ranks("save", location, check)


def load_directory(
    path: Where,
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None,
    full_model: FullModel | None = None,
    allow_pickle: bool = False,
    random_states: RandomStates | None = None,
) -> dict[str, Any]:
    """Load a directory or URL of shards, saved by any number of ranks, into the model and the optimizers.

    Args:
        full_model: describes the model of all stages; None: the model has no stages.
        random_states: restores the states of random generators, if the checkpoint has them.

    Returns the other entries, without the optimizers that were loaded from them.
    """
    checkpoint, rest = open_directory(path, weights_only, allow_pickle)
    saved = checkpoint.metadata.state_dict_metadata
    model_key = next((k for k in MODEL_KEYS if any(name.startswith(f"{k}.") for name in saved)), MODEL_KEYS[0])
    of_generators = {} if random_states is None else random_states.to_load(checkpoint.metadata)
    _load_model(checkpoint, model_key, model, optimizers, strict, full_model, of_generators)
    if random_states is not None:
        random_states.loaded(of_generators)
    for idx, optimizer in enumerate(optimizers):
        if not load_optimizer_of_directory(checkpoint, optimizer_key(idx), model, optimizer, rest):
            raise KeyError(_no_optimizer_text(path, idx))
    return rest


def load_entry_of_directory(
    path: Where, key: str, model: torch.nn.Module, strict: bool, full_model: FullModel | None, allow_pickle: bool
) -> bool:
    """Load another state of the model, which a directory or URL has as `key`; return whether it has one; collective."""
    checkpoint, _ = open_directory(path, None, allow_pickle)
    if not any(name.startswith(f"{key}.") for name in checkpoint.metadata.state_dict_metadata):
        return False
    _load_model(checkpoint, key, model, (), strict, full_model, {})
    return True


def _load_model(
    checkpoint: Checkpoint,
    key: str,
    model: torch.nn.Module,
    optimizers: Iterable[Optimizer],
    strict: bool,
    full_model: FullModel | None,
    others: dict[str, Any],
) -> None:
    """Load the entry `key` into the model, and the entries of `others` in the same read."""
    target = {key: target_of_model(checkpoint, key, model, optimizers)}
    if strict:
        prefix = f"{key}."
        saved = checkpoint.metadata.state_dict_metadata
        names = (name.removeprefix(prefix) for name in saved if name.startswith(prefix))
        _check_names(checkpoint.location, names, _names_of_all_stages(target[key], full_model))
    checkpoint.load({**target, **others}, allow_partial=not strict)
    model.load_state_dict(target[key], strict=strict)


def target_of_model(
    checkpoint: Checkpoint, key: str, model: torch.nn.Module, optimizers: Iterable[Optimizer]
) -> dict[str, Any]:
    """Return the model's state, into which the entry `key` of a checkpoint is loaded."""
    from weft.strategy.optimizers.split_loading import splits_weights, target_for_loading

    with explaining_added_entries(model):
        state: dict[str, Any] = get_model_state_dict(model)
    if not any(map(splits_weights, optimizers)):
        return state
    prefix = f"{key}."
    dtypes = {
        name.removeprefix(prefix): entry.properties.dtype
        for name, entry in checkpoint.metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    return target_for_loading(state, dtypes)


def open_directory(path: Where, weights_only: bool | None, allow_pickle: bool) -> tuple[Checkpoint, dict[str, Any]]:
    """Return an open directory, and its other entries; collective, so that no rank waits for one that raises."""
    directories.check_ranks(directories.location_of(path))

    def read() -> tuple[Checkpoint, dict[str, Any]]:
        checkpoint = directories.open_checkpoint(path, allow_pickle=allow_pickle, weights_only=weights_only)
        return checkpoint, checkpoint.rest()

    opened: tuple[Checkpoint, dict[str, Any]] = directories.on_all_ranks("load", path, read)
    return opened


def make_room(path: Where) -> None:
    """Remove a directory of weft at a path or URL, into which Lightning would write its own files; collective.

    Waits for a save in the background first.
    """
    background.wait(raises=False)
    location = directories.location_of(path)
    directories.on_first_rank("save", location, lambda: location.remove() if has_manifest(location) else None)


def _names_of_all_stages(local_names: Iterable[str], full_model: FullModel | None) -> set[str]:
    """Return the names of the entries in the model states of all stages; collective over the stages.

    With `full_model` None the model has no stages, and `local_names` are all names.
    """
    if full_model is None:
        return set(local_names)
    gathered: list[Any] = [None] * full_model.pipeline_group.size()
    dist.all_gather_object(gathered, list(local_names), group=full_model.pipeline_group)
    return {name for names in gathered for name in names}


def _check_names(path: Where, saved: Iterable[str], expected: Iterable[str]) -> None:
    """Raise RuntimeError, as `load_state_dict` does, unless a checkpoint has exactly the expected names.

    An expected entry that is a dict is saved under several names, each with the entry's name as a prefix.
    """
    saved, expected = set(saved), set(expected)
    prefixes = {name for name in expected if any(each.startswith(f"{name}.") for each in saved)}
    missing = sorted(expected - saved - prefixes)
    surplus = sorted(n for n in saved - expected if not any(n.startswith(f"{prefix}.") for prefix in prefixes))
    if missing or surplus:
        texts = [f"lacks {', '.join(missing)}"] * bool(missing)
        texts += [f"has the unexpected {', '.join(surplus)}"] * bool(surplus)
        raise RuntimeError(
            f"the checkpoint {str(path)!r} {' and '.join(texts)}; load it into the model that was saved, or pass "
            "strict=False (for a LightningModule, set strict_loading=False) to load only the entries that fit."
        )


def load_optimizer_of_directory(
    checkpoint: Checkpoint, key: str, model: torch.nn.Module, optimizer: Optimizer, rest: dict[str, Any]
) -> bool:
    """Load the optimizer saved as `key`: from `rest`, the other entries, or else from the shards.

    Returns whether the checkpoint has an optimizer `key`. An optimizer that had no state is in `rest`, and is removed
    from it.
    """
    if key in rest:
        load_state(model, optimizer, rest.pop(key))
        return True
    if any(name.startswith(f"{key}.") for name in checkpoint.metadata.state_dict_metadata):
        load_sharded_state(checkpoint, key, model, optimizer)
        return True
    return False


def load_file(
    path: Where,
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None,
    full_model: FullModel | None = None,
) -> dict[str, Any]:
    """Load a Trainer's single file, saved by any strategy, into the model and the optimizers.

    Every rank memory-maps the file, or its own copy of one at a URL, and reads only its shards; no tensors are
    communicated. Returns the file's other entries.
    """
    with local_file(path) as file:
        checkpoint: dict[str, Any] = torch.load(file, mmap=True, map_location="cpu", weights_only=weights_only)
    load_full_state(path, checkpoint.pop("state_dict"), model, strict, full_model)
    if optimizers:
        states = checkpoint.pop("optimizer_states", [])
        if len(states) < len(optimizers):
            raise KeyError(_no_optimizer_text(path, len(states)))
        for optimizer, state in zip(optimizers, states, strict=False):
            saved_state = state if full_model is None else rekey_by_name(state, model, optimizer, full_model)
            load_state(model, optimizer, saved_state)
    return checkpoint


def load_full_state(
    path: Where, saved: dict[str, Any], model: torch.nn.Module, strict: bool, full_model: FullModel | None
) -> None:
    """Load a state of unsharded tensors, from a checkpoint's file, into the model; see `load_file`."""
    with explaining_added_entries(model):
        target = get_model_state_dict(model)
    if full_model is not None:
        if strict:
            _check_names(path, saved, _names_of_all_stages(target, full_model))
        saved = {name: value for name, value in saved.items() if name in target}
    model.load_state_dict({name: _shard_like(value, target.get(name)) for name, value in saved.items()}, strict)


@contextmanager
def local_file(path: Where) -> Iterator[Path]:
    """Yield the path of a checkpoint file, or of a copy in a temporary folder if it is at a URL; then collective."""
    location = directories.location_of(path)
    if isinstance(location, LocalLocation):
        yield location.path
        return
    directories.check_ranks(location)
    folders: list[str] = []

    def copy() -> Path:
        folders.append(tempfile.mkdtemp(prefix="weft-"))
        file = Path(folders[0]) / (location.name or "checkpoint")
        location.copy_to(file)
        return file

    try:
        yield directories.on_all_ranks("load", location, copy)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _shard_like(value: Any, target: Any) -> Any:
    if not isinstance(target, DTensor) or isinstance(value, DTensor) or value.shape != target.shape:
        return value  # load_state_dict then raises one error that lists all wrong shapes
    from weft.strategy.data_parallel.local import shard_like

    return shard_like(value, target)


def _no_optimizer_text(path: Where, idx: int) -> str:
    return (
        f"the checkpoint {str(path)!r} has no state of optimizer {idx}: it was saved with weights only "
        "or by a run with fewer optimizers; load its weights into the model before fit, and fit without ckpt_path."
    )
