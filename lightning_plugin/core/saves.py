"""Decides which saves of a Trainer run in the background, and waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.constants import default_pg_timeout

from weft._plugin.process_guard import guard
from weft.strategy.checkpoint import background

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import StockStrategy


def report_seconds(strategy: StockStrategy) -> float:
    """Return how long the first rank waits for the files of the others, in a background save of this strategy."""
    timeout = strategy._timeout or default_pg_timeout
    return timeout.total_seconds()


def may_run_in_background(trainer: Any, path: Path) -> bool:
    """Return whether a save of this Trainer, which trains, may be written while training goes on.

    It may not while an exception ends the run, and when SLURM stops it ("hpc_ckpt_"). A ModelCheckpoint that links
    "last" to a checkpoint needs it complete.
    """
    if trainer.state.status != "running" or path.name.startswith("hpc_ckpt_"):
        return False
    return all(getattr(callback, "save_last", None) != "link" for callback in trainer.checkpoint_callbacks)


def let_checkpoints_see_saves(trainer: Any) -> None:
    """Let each ModelCheckpoint take a checkpoint that is being written for one that exists.

    It then chooses another name, as it does for one on the disk, unless it replaces that one.
    """
    for callback in trainer.checkpoint_callbacks:
        stock = getattr(callback, "file_exists", None)
        if stock is not None and not isinstance(stock, partial):
            callback.file_exists = partial(_file_exists, stock)


def _file_exists(stock: Callable[[Any, Any], bool], filepath: Any, trainer: Any) -> bool:
    exists = stock(filepath, trainer)  # collective
    return exists or background.is_writing(Path(filepath))


def finish_save_of_exception(trainer: Any) -> None:
    """Wait for this rank's part of a save in flight if a ModelCheckpoint saves on exceptions; not collective.

    The callback does not save a second time after the step that is being saved.
    """
    if any(getattr(callback, "save_on_exception", False) for callback in trainer.checkpoint_callbacks):
        with contextlib.suppress(Exception):  # the run's own exception is raised
            background.join()


def join_at_exit() -> None:
    """At a clean exit of this process, wait for a save in flight; if it has failed, end with status 1."""
    guard().on_clean_exit(_join)


def _join() -> None:
    try:
        background.join()
    except Exception as error:
        guard().fail_exit(error)
