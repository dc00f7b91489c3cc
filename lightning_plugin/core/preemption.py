"""The mixin of Preemption, a callback that saves a checkpoint and ends the run before the machine is taken away.

A scheduler announces that by a signal, often to one process of the job only. A signal handler may not start a
collective: another rank may be in the middle of one. So the handler sets a flag, and after each optimizer step all
ranks exchange their flags, one number, and agree on the step after which they save.

The handlers stay until Lightning restores those from before the run, at the very end of it: Lightning's own handler of
SIGTERM starts a collective, and a scheduler may repeat the signal while the run ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft._plugin.console import Console
from weft._plugin.monitors import check_at_least_one, num_steps
from weft._plugin.process_guard import guard
from weft._plugin.strategy_mixin import StrategyMixin

FILENAME = "preempted.ckpt"


class PreemptionMixin:
    """Saves a checkpoint and ends the run on all ranks, with an exit code, when a signal to any rank says so.

    All ranks save after the same optimizer step, as `trainer.save_checkpoint(dirpath / "preempted.ckpt")` does, and
    raise SystemExit. The next run resumes from that checkpoint; the last save replaces the one before.

        preemption = weft.lightning.Preemption("checkpoints")
        trainer = Trainer(devices=4, strategy="weft", callbacks=[preemption])
        trainer.fit(module, loader, ckpt_path=preemption.last_checkpoint())

    From the start of training to the end of the run, the signals have this meaning only. During validation, the run
    ends after the next training step, or after the validation if that is the end of training.

    Args:
        dirpath: the directory or URL of the checkpoint, the same on all ranks.
        signals: names of signals, not "SIGINT". "SIGTERM" is the usual one; SLURM sends what `--signal` says, such as
            "SIGUSR1".
        should_stop: also called at each exchange, on every rank; one rank that returns True is enough.
        exit_code: of the process that the user has started on each host or, under torchrun, of each rank.
        grace_seconds: the time that the machine gives from the signal on. After it, a rank that got the signal and its
            children end even if the checkpoint is not complete; the one before stays. With async_save, a save in
            flight is finished first. None: no limit.
        every_n_steps: the optimizer steps between two exchanges of flags. An exchange waits for the slowest rank.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        should_stop: Callable[[], bool] | None = None,
        exit_code: int = 143,
        grace_seconds: float | None = None,
        every_n_steps: int = 1,
    ) -> None:
        super().__init__()
        known = {each.name for each in signal.Signals} - {"SIGKILL", "SIGSTOP", "SIGINT"}
        unknown = [name for name in signals if name not in known]
        if isinstance(signals, str) or unknown:
            raise ValueError(f"Preemption got signals={signals!r}; pass a list of names, such as ['SIGTERM'].")
        if isinstance(exit_code, bool) or not isinstance(exit_code, int) or not 1 <= exit_code <= 255:
            raise ValueError(f"Preemption got exit_code={exit_code!r}; pass a number from 1 to 255.")
        if grace_seconds is not None and not grace_seconds > 0:
            raise ValueError(f"Preemption got grace_seconds={grace_seconds!r}; pass a positive number, or None.")
        check_at_least_one("Preemption", "every_n_steps", every_n_steps)
        from weft.strategy.checkpoint import joined

        self.dirpath = os.fspath(dirpath)
        self._location = joined(dirpath, FILENAME)
        self._signals = [signal.Signals[name] for name in signals]
        self._should_stop = should_stop
        self._exit_code = exit_code
        self._grace_seconds = grace_seconds
        self._every_n_steps = every_n_steps
        self._is_signalled = False
        self._step = 0

    def last_checkpoint(self) -> str | None:
        """Return the path of the checkpoint that a stopped run has saved, or None, for `trainer.fit(ckpt_path=...)`."""
        return str(self._location) if self._location.existing().is_used() else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the handlers of the signals, those of the Trainer included."""
        if not isinstance(trainer.strategy, StrategyMixin):
            raise TypeError(f"Preemption got a Trainer with a {type(trainer.strategy).__name__}; pass strategy='weft'.")
        self._is_signalled = False
        self._step = num_steps(trainer, pl_module)
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            for each in self._signals:
                signal.signal(each, self._on_signal)
            guard().limit_signals(self._signals, self._grace_seconds)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._is_signalled = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an optimizer step, exchange flags; if one is set, save and raise SystemExit."""
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._step == before or self._step % self._every_n_steps != 0:
            return
        self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Exchange flags a last time: of signals since the last step, such as during the last validation."""
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Any) -> None:
        wants_stop = self._is_signalled or (self._should_stop is not None and bool(self._should_stop()))
        if not _any(wants_stop, trainer.strategy.root_device):
            return
        trainer.strategy.wait_for_checkpoints(raises=False)
        trainer.save_checkpoint(str(self._location))
        trainer.strategy.wait_for_checkpoints()
        Console(trainer.strategy.fabric_module).log(
            f"weft: the run was stopped after step {self._step}, and saved as {str(self._location)!r}; it ends with "
            f"the exit code {self._exit_code}."
        )
        raise SystemExit(guard().end_with(self._exit_code))


def _any(flag: bool, device: torch.device) -> bool:
    """Return whether the flag of any rank is set; collective over the default group."""
    if dist.get_world_size() == 1:
        return flag
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())
