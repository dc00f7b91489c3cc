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

_METHOD = "_restore_modules_and_callbacks"


class Resuming:
    """Chooses the checkpoint from which the first `fit` of a Trainer goes on.

    Lightning passes the path to the end of the start-up through local variables, so its method that takes the path is
    replaced from `prepare` until it is called, or until `cancel`.
    """

    def __init__(self, engine: Engine, strategy: StockTrainerStrategy) -> None:
        self._engine, self._strategy = engine, strategy
        self._folders: list[str] | None = None  # of the Trainer's callbacks, as their caller has given them
        self._connector: Any = None

    def prepare(self) -> None:
        """Let a `fit` that begins now restore the newest checkpoint, if the Trainer has not trained yet.

        Call it before callbacks are set up: then a ModelCheckpoint has no `dirpath` unless its caller has given one.

        Raises:
            ValueError: no callback has a `dirpath`, or checkpoints are files.
        """
        if self._engine.options.resume is None:
            return
        trainer = self._strategy.lightning_module.trainer
        if self._folders is None:
            self._folders = _folders(trainer)
        if trainer.state.fn != "fit" or trainer.global_step > 0:
            return
        self._check()
        self._connector = connector = trainer._checkpoint_connector
        stock = getattr(type(connector), _METHOD).__get__(connector)

        def restore(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            self.cancel()
            stock(self._choose_on_first_rank(checkpoint_path), *args, **kwargs)

        setattr(connector, _METHOD, restore)

    def cancel(self) -> None:
        """Restore Lightning's method."""
        if self._connector is not None:
            vars(self._connector).pop(_METHOD, None)
            self._connector = None

    def _check(self) -> None:
        owner = type(self._strategy).__name__
        if not self._strategy._save_distributed_checkpoint:
            raise ValueError(
                f"{owner} got resume='auto' and save_distributed_checkpoint=False, and only directories are found; "
                "leave one of the two out."
            )
        if not self._folders:
            raise ValueError(
                f"{owner} got resume='auto', and no callback has a dirpath, without which each run saves to another "
                "folder; pass ModelCheckpoint(dirpath=...) or Preemption(dirpath=...)."
            )

    def _choose_on_first_rank(self, given: Any) -> Any:
        folders = self._folders or []
        chosen = on_first_rank("load", location_of(folders[0]), lambda: _choose(given, folders))
        path = self._strategy.broadcast(chosen)
        self._engine.console.log(
            f"weft: resume='auto' found no checkpoint in {' and '.join(map(repr, folders))}; training begins."
            if path is None
            else f"weft: resume='auto': training goes on from {str(path)!r}."
        )
        return path


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
    """Return the number of optimizer steps before a directory of weft was saved; -1 for others, or a damaged one."""
    location = location_of(path)
    try:
        rest = Manifest.read(location).rest if has_manifest(location) else None
    except ValueError:
        return -1
    step = rest.get("global_step") if isinstance(rest, dict) else None
    return step if isinstance(step, int) else -1
