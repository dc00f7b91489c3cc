"""Saves and loads the Trainer's checkpoints: directories of shards, or files that any Trainer loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from weft._plugin.checkpoint import load_directory, load_file, save_directory, without_none
from weft._plugin.consolidate import DIRECTORY_NOTE
from weft._plugin.optimizer_state import FullModel, full_state, merge_parameter_groups, named_state
from weft._plugin.saves import may_run_in_background, report_seconds
from weft.strategy import durable

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.stock_strategies import StockTrainerStrategy

__all__ = ["load", "optimizer_state", "save", "without_none"]


def optimizer_state(engine: Engine, strategy: StockTrainerStrategy, optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state: this rank's shards for `save`, or for a file the full state; collective."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)  # LightningOptimizer wraps the user's
    if not strategy._save_distributed_checkpoint:
        return full_state(inner, keep=strategy.is_global_zero)
    state = named_state(strategy.model, inner)
    if engine.pipeline is not None:
        merge_parameter_groups(state, engine.stages.group)
    return state


def save(
    engine: Engine, strategy: StockTrainerStrategy, checkpoint: dict[str, Any], filepath: Any, in_background: bool
) -> None:
    """Write a checkpoint as a directory, to which each rank writes its shards; collective."""
    stages = None if engine.pipeline is None else engine.stages.group
    path = Path(strategy.broadcast(filepath))
    in_background = in_background and may_run_in_background(strategy.lightning_module.trainer, path)
    seconds = report_seconds(strategy) if in_background else None
    save_directory(checkpoint, path, stages, engine.about(), seconds, engine.random_states)
    engine.console.log_once(DIRECTORY_NOTE)


def load(
    engine: Engine,
    strategy: StockTrainerStrategy,
    checkpoint_path: Any,
    optimizers: list[Optimizer],
    weights_only: bool | None,
    full_model: FullModel | None,
) -> dict[str, Any]:
    """Load a directory or a file, saved by any number of ranks, into the strategy's model and `optimizers`; collective.

    full_model: describes the full model if the model is in stages; else None.
    """
    path = durable.existing(Path(strategy.broadcast(checkpoint_path)))
    strict = strategy.lightning_module.strict_loading
    arguments = (path, strategy.model, optimizers, strict, weights_only, full_model)
    with torch.no_grad():
        if strategy.broadcast(path.is_dir()):  # the same on all ranks, also if the file system is late on some
            random_states = engine.random_states if strategy.lightning_module.trainer.state.fn == "fit" else None
            return load_directory(*arguments, engine.options.allow_pickle, random_states)
        return load_file(*arguments)
