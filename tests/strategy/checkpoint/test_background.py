"""Saves in the background: what is saved, when the old checkpoint goes, and how errors reach all ranks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from support.ranks import on_ranks
from weft.strategy import durable
from weft.strategy.checkpoint import background, open_checkpoint
from weft.strategy.checkpoint.background import _Save
from weft.strategy.checkpoint.host_copies import HostCopies
from weft.strategy.checkpoint.writing import ChunkWriter


def _state(rank: int, world_size: int, value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    local = torch.full((40, 30), value + rank)
    return {
        "model": {"w": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.full((3,), value)},
        "optimizer": {"lr": value, "scale": (torch.tensor(value),)},
    }


def _start(path: Path, state: dict[str, Any], rest: dict[str, Any], seconds: float = 60.0) -> None:
    partial = durable.temporary_name(path)
    if dist.get_rank() == 0:
        durable.remove(partial)
        partial.mkdir()
    dist.barrier()
    background.start(path, partial, state, rest, {"plan": "none"}, seconds)


def _check(path: Path, rank: int, world_size: int, value: float) -> None:
    target = _state(rank, world_size, -1.0)
    checkpoint = open_checkpoint(path)
    checkpoint.load(target)
    assert target["model"]["w"].to_local().eq(value + rank).all() and target["model"]["b"].eq(value).all()
    assert target["optimizer"]["lr"] == value and target["optimizer"]["scale"][0] == value
    assert checkpoint.rest()["score"] == value


@contextlib.contextmanager
def _gate() -> Iterator[threading.Event]:
    """While the event is not set, the threads of saves wait before they write."""
    gate = threading.Event()

    def wait(_: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "before_call", wait)
        yield gate


@on_ranks(2, 3)
def test_values_are_those_of_the_start(rank: int, world_size: int, tmp_path: Path) -> None:
    """Training changes tensors in place, also those in other entries, while the files are written."""
    path = tmp_path / "last.ckpt"
    addresses = set()
    with _gate() as gate:
        for value in (1.0, 2.0, 3.0):
            state, rest = _state(rank, world_size, value), {"score": torch.tensor(value), "list": [1]}
            gate.clear()
            with torch.inference_mode(value == 1.0):  # as in a validation of the Trainer
                _start(path, state, rest)
            addresses.add(background._process.copies._buffer.data_ptr())
            for tensor in (state["model"]["w"].to_local(), state["model"]["b"], *state["optimizer"]["scale"]):
                tensor.fill_(77.0)
            rest["score"].fill_(77.0)
            rest["list"].append(2)
            dist.barrier()
            assert path.exists() == (value > 1.0)
            assert background.is_writing(path) and not background.is_writing(tmp_path / "other.ckpt")
            if value > 1.0:
                _check(path, rank, world_size, value - 1.0)
            gate.set()
            background.wait()
            assert not background.is_writing(path)
            _check(path, rank, world_size, value)
            assert open_checkpoint(path).rest()["list"] == [1]
            dist.barrier()
            assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
            assert all(file.suffix in (".safetensors", ".json") for file in path.iterdir())
            dist.barrier()
    assert len(addresses) == 1  # the memory of the first save


@on_ranks(2)
def test_later_calls_run_when_the_new_one_is_there(rank: int, world_size: int, tmp_path: Path) -> None:
    path, found = tmp_path / "last.ckpt", []
    background.call_later(lambda: found.append(path.exists()))
    with _gate() as gate:
        _start(path, _state(rank, world_size, 1.0), {"score": 1.0})
        background.call_later(lambda: found.append(path.exists()))
        assert found == [False]
        gate.set()
        background.wait()
    background.call_later(lambda: found.append(path.exists()))
    assert found == ([False, True, True] if rank == 0 else [False, found[1], True])


@on_ranks(3)
@pytest.mark.parametrize("failing", [0, 1])
def test_error_reaches_all_ranks_and_keeps_the_old(
    rank: int, world_size: int, tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    _start(path, _state(rank, world_size, 1.0), {"score": 1.0})
    background.wait()

    def fail(_: ChunkWriter) -> Any:
        raise OSError("no space left")

    called: list[int] = []
    with monkeypatch.context() as patch:
        if rank == failing:
            patch.setattr(ChunkWriter, "write", fail)
        _start(path, _state(rank, world_size, 2.0), {"score": 2.0})
        background.call_later(lambda: called.append(1))
        text = r"^no space left$" if rank == failing else rf"rank {failing} failed to save .*OSError: no space left\)"
        with pytest.raises(OSError if rank == failing else RuntimeError, match=text):
            background.wait()
    assert called == [] or rank not in (0, failing)
    background.wait()  # nothing is in flight
    _check(path, rank, world_size, 1.0)
    _start(path, _state(rank, world_size, 3.0), {"score": 3.0})
    background.wait()
    _check(path, rank, world_size, 3.0)


@on_ranks(2)
def test_first_rank_waits_no_longer_than_it_should(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_Save, "_report", lambda *_: time.sleep(2.0))
        _start(path, _state(rank, world_size, 1.0), {"score": 1.0}, seconds=0.5)
        text = (
            r"rank 1 did not write its part of the checkpoint '.*last.ckpt' within 0.5 seconds after rank 0 had; pass"
        )
        with pytest.raises((TimeoutError, RuntimeError), match=text):
            background.wait()
    assert not path.exists()


@on_ranks(1)
def test_values_that_cannot_be_saved_raise_at_the_start(tmp_path: Path) -> None:
    partial = tmp_path / ".partial"
    partial.mkdir()
    with pytest.raises(Exception, match=r"cannot pickle|Can't pickle"):
        background.start(tmp_path / "a", partial, {}, {"f": threading.Lock()}, {}, 60.0)
    background.wait()
    assert os.listdir(partial) == []


@on_ranks(1)
def test_memory_of_copies_grows_and_is_freed() -> None:
    copies = HostCopies()
    transposed = torch.arange(6).view(2, 3).t()
    tensors = [transposed, torch.empty(0, 3), torch.tensor(True), torch.ones(3, dtype=torch.bfloat16)]
    for each, original in zip(copies.copy(tensors), tensors, strict=True):
        assert torch.equal(each, original) and each.dtype == original.dtype and each.is_contiguous()
    assert copies.num_bytes == 3 * 64
    address = copies._buffer.data_ptr()
    [one] = copies.copy([torch.full((2,), 3.0)])
    assert one.data_ptr() == address and one.tolist() == [3.0, 3.0]
    copies.copy([torch.zeros(100)])
    assert copies.num_bytes == 448
    copies.free()
    assert copies.num_bytes == 0 and copies.copy([]) == []
