"""Saves and loads the Trainer's checkpoints: directories of shards, or files that any Trainer loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from weft._plugin.checkpoint import (
    check_checkpoint_path,
    load_directory,
    load_entry_of_directory,
    load_file,
    load_full_state,
    make_room,
    save_directory,
    without_none,
    write_file,
)
from weft._plugin.consolidate import DIRECTORY_NOTE
from weft._plugin.optimizer_state import FullModel, full_state, merge_parameter_groups, named_state
from weft._plugin.saves import may_run_in_background, refuse_without_plan, report_seconds
from weft.strategy.checkpoint import Location, background, location_of, on_first_rank
from weft.strategy.checkpoint.manifest import has_manifest

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.stock_strategies import StockTrainerStrategy

__all__ = ["load", "load_entry", "optimizer_state", "save", "save_file", "without_none"]


def optimizer_state(engine: Engine, strategy: StockTrainerStrategy, optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state: this rank's shards for `save`, or for a file the full state; collective."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)  # LightningOptimizer wraps the user's
    if not strategy._save_distributed_checkpoint:
        return full_state(strategy.model, inner, keep=strategy.is_global_zero)
    state = named_state(strategy.model, inner)
    if engine.pipeline is not None:
        merge_parameter_groups(state, engine.stages.group)
    return state


def save(
    engine: Engine, strategy: StockTrainerStrategy, checkpoint: dict[str, Any], filepath: Any, in_background: bool
) -> None:
    """Write a checkpoint as a directory or URL, to which each rank writes its shards; collective."""
    stages = None if engine.pipeline is None else engine.stages.group
    location = location_of(strategy.broadcast(filepath))
    in_background = in_background and may_run_in_background(strategy.lightning_module.trainer, location.name)
    seconds = report_seconds(strategy) if in_background else None
    save_directory(checkpoint, location, stages, engine.about(), seconds, engine.random_states)
    engine.console.log_once(DIRECTORY_NOTE)


def save_file(
    engine: Engine, strategy: StockTrainerStrategy, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
) -> bool:
    """Write a checkpoint as one file, unless the stock strategy has to; return whether it is written; collective.

    A file at a path is as safe from crashes as a directory. At a URL, the CheckpointIO of Lightning or of the user
    writes it. The stock strategy is left to save at a path without a plan, or with a CheckpointIO of the user; a
    directory of weft there is removed before.
    """
    location = location_of(strategy.broadcast(filepath))
    if location.is_local:
        if storage_options is not None:
            return False  # the stock strategy raises an error
        is_stock = type(strategy.checkpoint_io).__module__.endswith("fabric.plugins.io.torch_io")
        if engine.plan is None or not is_stock:
            make_room(location)
            return False
        background.wait(raises=False)
        check_checkpoint_path(location)
        on_first_rank("save", location, lambda: write_file(checkpoint, location))
        return True
    refuse_without_plan(strategy, location)
    if engine.plan is None:
        make_room(location)
        return False
    if storage_options is not None and strategy._save_distributed_checkpoint:
        raise TypeError(
            f"{type(strategy).__name__} got storage_options for the directory {str(location)!r}; leave them out, and "
            "set options of fsspec in its configuration."
        )

    def write() -> None:
        strategy.checkpoint_io.save_checkpoint(checkpoint, str(location), storage_options)
        if has_manifest(location):  # until now, it was the checkpoint
            location.remove()

    background.wait(raises=False)
    on_first_rank("save", location, write)
    return True


def load(
    engine: Engine,
    strategy: StockTrainerStrategy,
    checkpoint_path: Any,
    optimizers: list[Optimizer],
    weights_only: bool | None,
    full_model: FullModel | None,
) -> dict[str, Any]:
    """Load what any number of ranks have saved, a directory or file, into the model and `optimizers`; collective.

    full_model: describes the full model if the model is in stages; else None.
    """
    location, is_directory = _located(strategy, checkpoint_path)
    strict = strategy.lightning_module.strict_loading
    arguments = (location, strategy.model, optimizers, strict, weights_only, full_model)
    with torch.no_grad():
        if is_directory:
            random_states = engine.random_states if strategy.lightning_module.trainer.state.fn == "fit" else None
            return load_directory(*arguments, engine.options.allow_pickle, random_states)
        return load_file(*arguments)


def load_entry(
    engine: Engine,
    strategy: StockTrainerStrategy,
    checkpoint_path: Any,
    entries: dict[str, Any],
    full_model: FullModel | None,
    key: str,
) -> bool:
    """Load another state of the model, which the checkpoint has as `key`; return whether it has one; collective.

    entries: the states that `load` has returned, of a file; a directory is opened again.
    """
    location, is_directory = _located(strategy, checkpoint_path)
    model, strict = strategy.model, strategy.lightning_module.strict_loading
    with torch.no_grad():
        if is_directory:
            return load_entry_of_directory(location, key, model, strict, full_model, engine.options.allow_pickle)
        if key in entries:
            load_full_state(location, entries[key], model, strict, full_model)
    return key in entries


def _located(strategy: StockTrainerStrategy, checkpoint_path: Any) -> tuple[Location, bool]:
    """Return where a checkpoint is, and whether it is a directory; collective."""
    location = location_of(strategy.broadcast(checkpoint_path)).existing()
    # The same on all ranks, also if the file system is late on some.
    return location, strategy.broadcast(on_first_rank("load", location, location.is_directory))
