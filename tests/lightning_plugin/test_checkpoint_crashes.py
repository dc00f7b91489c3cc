"""Ranks that are killed while they save leave the old or the new checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from support.processes import run_on_forks
from weft._plugin import checkpoint as checkpoints
from weft.strategy import convert, durable
from weft.strategy.checkpoint import background, open_checkpoint

# Calls on the file system inside torch.distributed.checkpoint and torch.save, as Python reports them.
REMOVALS = {"os.remove", "os.rmdir"}
AUDITED = {"open", "os.mkdir", "os.rename", *REMOVALS}
OLD, NEW = 1.0, 2.0
SHAPES = {"first": (8, 4), "second": (6,)}  # replicated tensors, which the ranks share among them


def _state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def save(rank: int, value: float, path: Path, kind: str) -> None:
    if kind == "file":
        if rank == 0:
            checkpoints.write_file({"state_dict": _state(value)}, path)
        dist.barrier()
        return
    if kind == "background":
        checkpoints.write_directory({"model": _state(value)}, {}, {"epoch": value}, path, background_seconds=60.0)
        background.wait()
        return
    checkpoints.write_directory({"model": _state(value)}, {}, {"epoch": value}, path)


def save_and_die(rank: int, path: Path, kind: str, victim: int, number: int) -> None:
    """Save new values; the process `victim` kills all ranks before its call `number` on a file system."""
    calls = 0
    is_watching = True

    def count(*_: Any) -> None:
        nonlocal calls
        if calls == number:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        calls += 1

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        # shutil.rmtree names what it removes relative to a directory.
        is_inside = event in REMOVALS or str(path.parent) in str(arguments[0])
        if is_watching and event in AUDITED and is_inside:
            count()

    if rank == victim:
        durable.before_call = count
        sys.addaudithook(audit)
    save(rank, NEW, path, kind)
    is_watching = False


def loaded(path: Path) -> float:
    """Return the value of all tensors of a complete checkpoint."""
    path = durable.existing(path)
    if path.is_file():
        values = torch.load(path)["state_dict"]
    else:
        values = {name: torch.zeros_like(value) for name, value in _state(0.0).items()}
        checkpoint = open_checkpoint(path)
        checkpoint.load({"model": values}, alone=True)
        assert checkpoint.rest() == {"epoch": next(iter(values.values())).flatten()[0].item()}
    found = {value.unique().item() for value in values.values()}
    assert len(found) == 1 and values.keys() == _state(0.0).keys()
    return found.pop()


@pytest.mark.parametrize(
    ("old", "new", "victim", "can_exchange", "stride", "min_calls"),
    [
        ("directory", "directory", 0, True, 1, 25),
        ("directory", "directory", 0, False, 3, 25),
        (None, "directory", 0, True, 3, 15),
        ("directory", "directory", 1, True, 1, 1),
        ("directory", "file", 0, True, 3, 5),
        ("directory", "file", 0, False, 3, 5),
        ("file", "directory", 0, True, 3, 20),
        ("directory", "background", 0, True, 2, 25),
        ("directory", "background", 1, True, 1, 1),
    ],
)
def test_killed_save_leaves_old_or_new(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str | None,
    new: str,
    victim: int,
    can_exchange: bool,
    stride: int,
    min_calls: int,
) -> None:
    """Ranks are killed before every `stride`-th call on the file system."""
    if not can_exchange:
        monkeypatch.setattr(durable, "_exchange", lambda *_: False)
    folder = tmp_path / "checkpoints"
    path = folder / "last.ckpt"
    if old is not None:
        assert run_on_forks(2, save, OLD, tmp_path / "old" / "last.ckpt", old) == [0, 0]
    num_old, num_new = 0, 0

    def is_killed(number: int) -> bool:
        """Kill the ranks before a call of the victim, and check the directory; return False if there is none."""
        nonlocal num_old, num_new
        shutil.rmtree(folder, ignore_errors=True)
        if old is not None:
            shutil.copytree(tmp_path / "old", folder)
        statuses = run_on_forks(2, save_and_die, path, new, victim, number)
        if statuses == [0, 0]:
            return False
        assert statuses == [-signal.SIGKILL] * 2
        if durable.existing(path).exists():
            value = loaded(path)
            num_old += value == OLD
            num_new += value == NEW
        else:
            assert old is None
        if number % (4 * stride) == 0:  # the next save removes what is left
            assert run_on_forks(2, save, NEW, path, new) == [0, 0]
            assert os.listdir(folder) == ["last.ckpt"] and loaded(path) == NEW
        return True

    number = 0
    while is_killed(number):
        number += stride
    for last in range(number - stride + 1, number):  # also the calls after the new one has its name
        is_killed(last)
    assert run_on_forks(2, save, NEW, path, new) == [0, 0]
    assert os.listdir(folder) == ["last.ckpt"] and loaded(path) == NEW
    assert number >= min_calls
    assert num_new > 0 or victim == 1
    assert (num_old > 0) == (old is not None)


def test_convert_finds_checkpoint_after_an_interrupted_exchange(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert run_on_forks(2, save, OLD, path, "directory") == [0, 0]
    path.rename(durable._beside(path, "previous"))
    convert(path, tmp_path / "converted")
    stored = load_file(tmp_path / "converted" / "model.safetensors")
    assert stored.keys() == _state(OLD).keys()
    assert all(torch.equal(stored[name], value) for name, value in _state(OLD).items())
