"""Decides which saves of a Trainer run in the background, and waits for them."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.constants import default_pg_timeout

from weft._plugin.process_guard import guard
from weft.strategy.checkpoint import Location, background, location_of, on_first_rank
from weft.strategy.checkpoint.manifest import has_manifest

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import StockStrategy


def report_seconds(strategy: StockStrategy) -> float:
    """Return how long the first rank waits for the files of the others, in a background save of this strategy."""
    timeout = strategy._timeout or default_pg_timeout
    return timeout.total_seconds()


def may_run_in_background(trainer: Any, name: str) -> bool:
    """Return whether a save named `name` of this Trainer, which trains, may be written while training goes on.

    It may not while an exception ends the run, and when SLURM stops it ("hpc_ckpt_"). A ModelCheckpoint that links
    "last" to a checkpoint needs it complete.
    """
    if trainer.state.status != "running" or name.startswith("hpc_ckpt_"):
        return False
    return all(getattr(callback, "save_last", None) != "link" for callback in trainer.checkpoint_callbacks)


def let_checkpoints_see_saves(trainer: Any) -> None:
    """Let each ModelCheckpoint see the checkpoints that weft writes.

    It takes one that is being written for one that exists, and chooses another name, as it does for one on the disk,
    unless it replaces that one.
    """
    for callback in trainer.checkpoint_callbacks:
        stock = getattr(callback, "file_exists", None)
        if stock is not None and not isinstance(stock, partial):
            callback.file_exists = partial(_file_exists, stock)


def _file_exists(stock: Callable[[Any, Any], bool], filepath: Any, trainer: Any) -> bool:
    location = location_of(filepath)
    if location.is_local:
        exists = stock(filepath, trainer)  # collective
    else:  # Lightning would also count what a killed save has left, and rely on a list of files from before
        exists = trainer.strategy.broadcast(on_first_rank("save", location, location.is_used))
    return exists or background.is_writing(location)


def takes_urls(strategy: Any) -> bool:
    """Return whether the stock strategy saves at URLs and loads from them; versions to 2.6 make local paths of them."""
    return hasattr(importlib.import_module(f"{strategy.fabric_module}.utilities.cloud_io"), "_resolve_path")


def refuse_without_plan(strategy: Any, location: Location) -> None:
    """Raise ValueError for a URL if there is no plan and the stock strategy would make a local path of it."""
    if strategy.plan is None and not location.is_local and not takes_urls(strategy):
        raise ValueError(
            f"{type(strategy).__name__} got no plan and the checkpoint {str(location)!r}; pass a plan, such as 'auto', "
            "or a local path."
        )


def refuse_stock_save(strategy: Any, location: Location) -> None:
    """Raise ValueError for a URL if the stock strategy of Fabric would make a local path of it."""
    refuse_without_plan(strategy, location)
    if not location.is_local and not takes_urls(strategy):
        raise ValueError(
            f"{type(strategy).__name__} got the checkpoint {str(location)!r} with storage_options, a filter, or not "
            "exactly one model; save one model with none of these, or to a local path."
        )


def remove(location: Location) -> bool:
    """Remove the checkpoint at a URL if weft has written it as a directory; return whether it has.

    A store that does not allow it is a warning: the new checkpoint is complete.
    """
    if location.is_local:
        return False
    try:
        if not has_manifest(location):
            return False
        location.remove()
    except Exception as error:
        warnings.warn(f"weft: {str(location)!r} cannot be removed ({error}); remove it yourself.", stacklevel=2)
    return True


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
    guard().before_executors_end(_wait)


def _wait() -> None:
    with contextlib.suppress(Exception):  # `_join` reports it
        background.join()


def _join() -> None:
    try:
        background.join()
    except Exception as error:
        guard().fail_exit(error)
