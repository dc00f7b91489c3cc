"""The option resume="auto": `fit` goes on from the newest checkpoint that earlier processes of the job have saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from weft._plugin.newest import newest_checkpoint
from weft.strategy.checkpoint import location_of, on_first_rank
from weft.strategy.checkpoint.manifest import Manifest, has_manifest

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.stock_strategies import StockTrainerStrategy


def resume_from_newest(engine: Engine, strategy: StockTrainerStrategy) -> None:
    """Let the Trainer's next `fit`, if it is the Trainer's first one, restore the newest checkpoint of its callbacks.

    The Trainer calls this before callbacks are set up: then a ModelCheckpoint has no `dirpath` unless its caller has
    given one. Lightning passes the path through local variables, so its method that takes it is replaced for one call.

    Raises:
        ValueError: no callback has a `dirpath`, or checkpoints are files.
    """
    trainer = strategy.lightning_module.trainer
    if trainer.state.fn != "fit" or trainer.global_step > 0:
        return
    folders = _folders(trainer)
    owner = type(strategy).__name__
    if not strategy._save_distributed_checkpoint:
        raise ValueError(
            f"{owner} got resume='auto' and save_distributed_checkpoint=False, and only directories are found; "
            "leave one of the two out."
        )
    if not folders:
        raise ValueError(
            f"{owner} got resume='auto', and no callback has a dirpath, without which each run saves to another "
            "folder; pass ModelCheckpoint(dirpath=...) or Preemption(dirpath=...)."
        )
    connector = trainer._checkpoint_connector
    stock = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        del connector.resume_start  # the next call is the stock method's
        path = strategy.broadcast(on_first_rank("load", location_of(folders[0]), lambda: _choose(checkpoint_path, folders)))
        engine.console.log(
            f"weft: resume='auto' found no checkpoint in {' and '.join(map(repr, folders))}; training begins."
            if path is None
            else f"weft: resume='auto': training goes on from {str(path)!r}."
        )
        stock(path, *args, **kwargs)

    connector.resume_start = resume_start


def _folders(trainer: Any) -> list[str]:
    """Return the folders and URLs to which the Trainer's callbacks save, each once."""
    found = (getattr(callback, "dirpath", None) for callback in trainer.callbacks)
    return list(dict.fromkeys(os.fspath(each) for each in found if isinstance(each, (str, os.PathLike))))


def _choose(given: Any, folders: list[str]) -> Any:
    """Return the newest checkpoint in the folders, or `given` if they have none or it is of a later step."""
    found = [path for path in map(newest_checkpoint, folders) if path is not None]
    newest = max(found, key=_step_of, default=None)
    if newest is None or (given is not None and _step_of(given) > _step_of(newest)):
        return given
    return newest


def _step_of(path: Any) -> int:
    """Return the number of optimizer steps before a directory of weft was saved; -1 for other checkpoints."""
    location = location_of(path)
    if not has_manifest(location):
        return -1
    rest = Manifest.read(location).rest
    step = rest.get("global_step") if isinstance(rest, dict) else None
    return step if isinstance(step, int) else -1
