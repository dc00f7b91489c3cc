"""Preemption: a signal to one rank ends all of them after one step, with a checkpoint from which training goes on."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning_plugin.scripts.plugin_models import (
    NUM_BATCHES,
    Model,
    ResumableLoader,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor

from support.processes import ProcessTree, assert_nothing_left
from support.ranks import on_ranks, run_on_ranks
from weft._plugin.process_guard import SIGNAL_GRACE_SECONDS
from weft.lightning import Preemption, newest_checkpoint
from weft.strategy import durable
from weft.strategy.checkpoint import open_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "preempted.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}


class _Signalled(Preemption):
    """Sends a signal to its own process before step `at` ends."""

    at = 0
    signum = signal.SIGTERM

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at - 1:
            os.kill(os.getpid(), self.signum)


def _train(rank: int, world_size: int, folder: str, stops: dict[int, str]) -> tuple[list[int], dict[str, Tensor]]:
    """Train two epochs, stopped after each step in `stops` by a signal to the last rank, or as rank 0 is "asked"."""
    set_torchrun_environment(rank, world_size)
    before = signal.getsignal(signal.SIGTERM)
    steps = []
    path: str | None = None
    for step, how in stops.items():
        asked = functools.partial(_is_after, step) if how == "asked" and rank == 0 else None
        preemption = _Signalled(folder, should_stop=asked and functools.partial(asked, runs := []))
        if how != "asked" and rank == world_size - 1:
            preemption.at, preemption.signum = step, signal.Signals[how]
        run = trainer(world_size, "weft", folder, max_epochs=2, callbacks=[preemption])
        if asked:
            runs.append(run)
        with pytest.raises(SystemExit) as stopped:
            run.fit(Model(seed=99 if path else 0), ResumableLoader(), ckpt_path=path)
        assert stopped.value.code == 143
        path = preemption.last_checkpoint()
        assert path is not None and path == newest_checkpoint(folder)
        assert open_checkpoint(Path(path)).rest()["global_step"] == step
        assert signal.getsignal(signal.SIGTERM) == before
        steps.append(run.global_step)
    model = Model(seed=99 if path else 0)
    run = trainer(world_size, "weft", folder, max_epochs=2)
    run.fit(model, ResumableLoader(), ckpt_path=path)
    return [*steps, run.global_step], weights(model)


def _is_after(step: int, runs: list[Any]) -> bool:
    return bool(runs[0].global_step == step)


@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_training_goes_on_as_if_undisturbed(tmp_path: Path, world_size: int) -> None:
    """Stopped three times within an epoch, and once at its end."""
    (tmp_path / "undisturbed").mkdir()
    expected = run_on_ranks(world_size, _train, folder=str(tmp_path / "undisturbed"), stops={})[0][1]
    for name, stops in (("within", {2: "SIGTERM", 4: "asked", 8: "SIGUSR1"}), ("end", {6: "SIGTERM"})):
        (tmp_path / name).mkdir()
        for steps, found in run_on_ranks(world_size, _train, folder=str(tmp_path / name), stops=stops):
            assert steps == [*stops, 12]
            assert_same_weights(found, expected)


@on_ranks(2)
def test_flags_are_exchanged_every_n_steps(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(run.global_step)
        return rank == 1 and run.global_step >= 3

    preemption = Preemption(tmp_path, signals=[], should_stop=should_stop, every_n_steps=2, exit_code=7)
    run = trainer(world_size, "weft", tmp_path, max_epochs=2, callbacks=[preemption])
    with pytest.raises(SystemExit) as stopped:
        run.fit(Model(), loader())
    assert stopped.value.code == 7 and asked == [2, 4]


@on_ranks(1)
def test_accumulated_batches_are_not_cut(tmp_path: Path) -> None:
    set_torchrun_environment(0, 1)
    preemption = Preemption(tmp_path, should_stop=lambda: True)
    run = trainer(1, "weft", tmp_path, max_epochs=1, callbacks=[preemption], accumulate_grad_batches=3)
    model = Model()
    with pytest.raises(SystemExit):
        run.fit(model, loader())
    assert run.global_step == 1 and len(model.losses) == 3


@on_ranks(1)
def test_newest_checkpoint(tmp_path: Path) -> None:
    set_torchrun_environment(0, 1)
    assert newest_checkpoint(tmp_path / "none") is None
    for steps, name in ((3, "a.ckpt"), (5, "b.ckpt"), (4, "c.ckpt")):
        run = trainer(1, "weft", tmp_path / "runs", max_steps=steps)
        run.fit(Model(), loader())
        run.save_checkpoint(tmp_path / name)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "b.ckpt")
    damaged = tmp_path / "b.ckpt" / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "b.ckpt")
    assert newest_checkpoint(tmp_path, verify=True) == str(tmp_path / "c.ckpt")
    os.truncate(damaged, 100)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "c.ckpt")
    (tmp_path / "c.ckpt").rename(tmp_path / ".weft-0123.partial")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "a.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    (tmp_path / "a.ckpt").rename(durable._beside(tmp_path / "a.ckpt", "previous"))  # as an interrupted save leaves it
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.endswith(".previous") and open_checkpoint(Path(found)).rest()["global_step"] == 3


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Preemption got signals=\['SIGKILL'\]; pass a list of names, such as"):
        Preemption(tmp_path, signals=["SIGKILL"])
    with pytest.raises(ValueError, match="Preemption got signals='SIGTERM'; pass a list of names"):
        Preemption(tmp_path, signals="SIGTERM")
    with pytest.raises(ValueError, match=r"Preemption got signals=\['SIGINT'\]; pass a list of names, such as"):
        Preemption(tmp_path, signals=["SIGINT"])
    with pytest.raises(ValueError, match="Preemption got exit_code=0; pass a number from 1 to 255"):
        Preemption(tmp_path, exit_code=0)
    with pytest.raises(ValueError, match="Preemption got grace_seconds=-1; pass a positive number, or None"):
        Preemption(tmp_path, grace_seconds=-1)
    with pytest.raises(ValueError, match="Preemption got every_n_steps=0; pass a number of steps from 1 on"):
        Preemption(tmp_path, every_n_steps=0)


def _run(
    folder: Path, launcher: list[str], target: str, warm_processes: int, grace: float = 60.0, delay: float = 0.0
) -> str:
    """Start two ranks, signal a process, and wait until all have ended with the exit code; return stderr."""
    command = [*launcher, SCRIPT, folder, str(grace), str(delay)]
    with ProcessTree(command, env=ENVIRONMENT, warm_processes=warm_processes) as tree:
        for rank in (0, 1):
            tree.wait_for_text(f"READY {rank}", timeout=240)
        pids = {int(r): int(pid) for r, pid in re.findall(r"READY (\d) (\d+)", tree.stdout)}
        if target == "root":
            tree.send_signal(signal.SIGTERM)
        else:
            os.kill(pids[int(target)], signal.SIGTERM)
        result = tree.wait(30.0)
        assert_nothing_left(tree.pgid, within=5.0)
        is_torchrun = len(launcher) > 1
        assert "ended by itself" not in result.stdout, result.stdout
        assert is_torchrun or "Traceback" not in result.stderr, result.stderr
        assert result.returncode == 143 or (is_torchrun and result.returncode != 0), result.stderr
        return result.stderr


def _saved_step(folder: Path) -> int:
    step = open_checkpoint(folder / "preempted.ckpt").rest()["global_step"]
    assert isinstance(step, int)
    return step


@pytest.mark.parametrize("target", ["0", "1"])
def test_signal_to_one_rank_ends_the_tree(tmp_path: Path, target: str) -> None:
    stderr = _run(tmp_path, [sys.executable], target, 2)
    first = _saved_step(tmp_path)
    assert first >= 2 and f"stopped after step {first}, and saved as" in stderr and "ending all ranks" not in stderr
    _run(tmp_path, [sys.executable], target, 2)
    assert _saved_step(tmp_path) >= first + 2  # the second run has resumed


def test_signal_to_torchrun_ends_the_tree(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _run(tmp_path, launcher, "root", 3)
    assert _saved_step(tmp_path) >= 2


def test_save_may_take_the_grace_time(tmp_path: Path) -> None:
    """Longer than the time after which the guard ends a run that gets SIGTERM otherwise; not longer than given."""
    _run(tmp_path / "long", [sys.executable], "0", 2, grace=60.0, delay=SIGNAL_GRACE_SECONDS + 1.5)
    assert _saved_step(tmp_path / "long") >= 2
    begin = time.monotonic()
    _run(tmp_path / "short", [sys.executable], "0", 2, grace=1.0, delay=60.0)
    assert time.monotonic() - begin < 55 and not (tmp_path / "short" / "preempted.ckpt").exists()


@on_ranks(2)
def test_signal_in_the_last_validation_stops(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)

    class Signalled(Preemption):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if rank == 1 and not trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGUSR1)

    preemption = Signalled(tmp_path)
    run = trainer(world_size, "weft", tmp_path, max_epochs=1, callbacks=[preemption])
    with pytest.raises(SystemExit) as stopped:
        run.fit(Model(), loader(), loader())
    assert stopped.value.code == 143 and _saved_step(tmp_path) == NUM_BATCHES
