"""Directories that are written on one mesh and read on another: values, bytes, and memory."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ops.memory.counting import counted
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from support.ranks import on_ranks, run_on_ranks
from weft.strategy.checkpoint import on_all_ranks, on_first_rank, open_checkpoint, save
from weft.strategy.checkpoint.reading import ChunkReader

# name -> (shape, dtype, dim that tensor parallelism shards)
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {
    "column": ((768, 512), torch.float32, 0),
    "row": ((512, 768), torch.float32, 1),
    "half": ((768, 256), torch.bfloat16, 0),
    "other half": ((256, 768), torch.bfloat16, 1),
    "norm": ((512,), torch.float32, None),
    "bias": ((768,), torch.float64, 0),
    "experts": ((4, 96, 128), torch.float16, 1),
    "complex": ((12, 8), torch.complex128, 0),
    "empty": ((0, 8), torch.float32, None),
    "uneven": ((5, 3), torch.float32, 0),
}


def _full(name: str) -> Tensor:
    shape, dtype, _ = TENSORS[name]
    generator = torch.Generator().manual_seed(sorted(TENSORS).index(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _sharded(sizes: tuple[int, int], values: bool) -> dict[str, DTensor]:
    """Return the tensors on a mesh of data-parallel and tensor-parallel ranks, with their values or with zeros."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    result = {}
    for name, (_, _, dim) in TENSORS.items():
        full = _full(name)
        placements = (Replicate(), Replicate() if dim is None else Shard(dim))
        result[name] = distribute_tensor(full if values else torch.zeros_like(full), mesh, placements)
    return result


def _save(rank: int, world_size: int, folder: Path, tp: int) -> int:
    """Save, and return the bytes of this rank's file."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    tensors = _sharded((world_size // tp, tp), values=True)
    state = {
        "model": tensors,
        "optimizer": {"groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["column", "row"]}], "step": 3},
    }
    pickled = save(
        folder, state, {"epoch": 2, "score": torch.tensor(0.5), "names": {1: "a"}}, {"mesh": {"tensor_parallel": tp}}
    )
    assert pickled == ()
    dist.barrier()
    file = folder / f"rank-{rank:05}.safetensors"
    return file.stat().st_size if file.is_file() else 0


def _load(rank: int, world_size: int, folder: Path, tp: int) -> tuple[int, int, int]:
    """Load and compare; return the bytes read, those of the shards, and the peak of counted memory."""
    tensors = _sharded((world_size // tp, tp), values=False)
    state: dict[str, Any] = {
        "model": tensors,
        "optimizer": {"groups": [{"lr": None, "betas": None, "params": [None, None]}], "step": None},
    }
    checkpoint = open_checkpoint(folder)
    before = ChunkReader.num_bytes_read
    with counted() as count:
        checkpoint.load(state)
        peak = count.peak()
    num_read = ChunkReader.num_bytes_read - before
    for name, tensor in tensors.items():
        assert torch.equal(tensor.full_tensor(), _full(name)), name
    assert state["optimizer"]["step"] == 3
    [group] = state["optimizer"]["groups"]
    assert group == {"lr": 0.1, "betas": (0.9, 0.95), "params": ["column", "row"]}
    rest = checkpoint.rest()
    assert rest.pop("score").item() == 0.5 and rest == {"epoch": 2, "names": {1: "a"}}
    return num_read, sum(tensor.to_local().nbytes for tensor in tensors.values()), peak


@pytest.mark.parametrize(("saved", "tp"), [(1, 1), (2, 2), (4, 2), (3, 3)])
def test_every_mesh_reads_what_another_wrote(tmp_path: Path, saved: int, tp: int) -> None:
    folder = tmp_path / "checkpoint"
    written = run_on_ranks(saved, _save, folder=folder, tp=tp)
    total = sum(_full(name).nbytes for name in TENSORS)
    assert total <= sum(written) <= 1.02 * total + 16384
    assert max(written) <= 1.1 * min(written), written
    for loading, loading_tp in ((1, 1), (2, 2), (4, 4), (3, 3), (4, 2)):
        for num_read, shard, peak in run_on_ranks(loading, _load, folder=folder, tp=loading_tp):
            bound = 1.1 if 3 not in (saved, loading) else 1.5  # small tensors have 8 blocks or fewer, not thirds
            assert shard <= num_read <= bound * shard, (loading, loading_tp, num_read / shard)
            assert peak <= 8 << 20


@on_ranks(2)
def test_replicated_tensors_are_dealt_by_size(rank: int, tmp_path: Path) -> None:
    """In their order, one rank would write three times the bytes of the other."""
    save(tmp_path, {"model": {name: torch.ones(size << 14) for name, size in (("a", 1), ("b", 1), ("c", 2))}}, {}, {})
    dist.barrier()
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("rank-*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) <= 1.1 * min(sizes), sizes


@on_ranks(2)
def test_torch_would_count_the_same_entries(rank: int, tmp_path: Path) -> None:
    """The entries and paths are those that torch.distributed.checkpoint lists for the same state."""
    state = {"model": _sharded((1, 2), values=True), "other": {"a": [1, {"b": torch.ones(2)}], "none": None}}
    for name in ("ours", "torchs"):
        (tmp_path / name).mkdir(exist_ok=True)
    dist.barrier()
    save(tmp_path / "ours", state, {}, {})
    dcp.save(state, checkpoint_id=tmp_path / "torchs")
    dist.barrier()
    ours = open_checkpoint(tmp_path / "ours").metadata
    torchs = dcp.FileSystemReader(tmp_path / "torchs").read_metadata()
    assert ours.planner_data == {name: tuple(path) for name, path in torchs.planner_data.items()}
    assert ours.state_dict_metadata.keys() == torchs.state_dict_metadata.keys()
    for name, entry in torchs.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        assert type(own) is type(entry)
        if hasattr(entry, "size"):
            assert (own.size, own.properties.dtype) == (entry.size, entry.properties.dtype)
            assert {(c.offsets, c.sizes) for c in own.chunks} == {(c.offsets, c.sizes) for c in entry.chunks}


class _Settings:
    """An object that JSON cannot carry."""

    def __init__(self, value: int) -> None:
        self.value = value


@on_ranks(1)
def test_objects_are_unpickled_only_if_allowed(tmp_path: Path) -> None:
    rest = {"hyper_parameters": {"config": _Settings(3)}, "epoch": 1}
    assert save(tmp_path, {"model": {"w": torch.ones(2)}}, rest, {}) == ("hyper_parameters.config",)
    with pytest.raises(ValueError, match=r"run code: hyper_parameters.config; pass allow_pickle=True, an"):
        open_checkpoint(tmp_path).rest()
    target = {"model": {"w": torch.zeros(2)}}
    open_checkpoint(tmp_path).load(target)  # the tensors do not need it
    assert target["model"]["w"].eq(1).all()
    found = open_checkpoint(tmp_path, allow_pickle=True).rest()
    assert found["hyper_parameters"]["config"].value == 3 and found["epoch"] == 1


@on_ranks(1)
def test_files_are_safetensors(tmp_path: Path) -> None:
    """Other programs read the chunks; a chunk in panels has the panels as its first dim."""
    tensors = {name: _full(name) for name in TENSORS}
    save(tmp_path, {"model": tensors}, {}, {"mesh": {"tensor_parallel": 1}})
    with safe_open(tmp_path / "rank-00000.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            stored = file.get_tensor(f"model.{name}")
            if stored.shape != tensor.shape and tensor.dtype is not torch.complex128:
                stored = torch.cat(list(stored), 1)
            assert stored.numel() * stored.itemsize == tensor.nbytes
            assert tensor.dtype is torch.complex128 or torch.equal(stored, tensor), name
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["about"] == {"mesh": {"tensor_parallel": 1}} and manifest["version"] == 1


@on_ranks(2)
def test_error_of_one_rank_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        (tmp_path / "rank-00001.safetensors").write_bytes(b"in the way")
    dist.barrier()
    error, text = (RuntimeError, r"rank 1 failed to save the checkpoint '.*' \(FileExistsError: .*\); remove")
    if rank == 1:
        error, text = FileExistsError, "rank-00001.safetensors"
    with pytest.raises(error, match=text):
        save(tmp_path, {"model": _sharded((1, 2), values=True)}, {}, {})
    assert not (tmp_path / "manifest.json").exists()


@on_ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_value_that_cannot_be_pickled_raises_on_all(rank: int, failing: int, tmp_path: Path) -> None:
    state = {"optimizer": {f"of rank {rank}": lambda: None if rank == failing else 1}}
    with pytest.raises(RuntimeError, match=r"rank \d failed to save the checkpoint '.*' \(.*pickle"):
        save(tmp_path, state, {}, {})


@on_ranks(2)
def test_error_in_other_entries_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    """Only the first rank writes them; the others must not wait for it until a time-out."""
    error, text = (AttributeError, "lambda") if rank == 0 else (RuntimeError, r"rank 0 failed to save .*lambda")
    with pytest.raises((error, PicklingError), match=text):
        save(tmp_path, {"model": {"w": torch.ones(2)}}, {"f": lambda: None}, {})


@on_ranks(3)
def test_error_of_a_rank_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    def call() -> int:
        if rank == 1:
            raise OSError("the file system is late")
        return rank

    error = OSError if rank == 1 else RuntimeError
    with pytest.raises(error, match="the file system is late"):
        on_all_ranks("load", tmp_path, call)
    assert on_all_ranks("load", tmp_path, lambda: rank) == rank
    assert on_first_rank("load", tmp_path, lambda: "first") == ("first" if rank == 0 else None)


@on_ranks(1)
def test_conjugated_and_unsupported_tensors(tmp_path: Path) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    save(tmp_path, {"model": {"conj": x.conj().t(), "imag": x.conj().imag}}, {"conj": x.conj()}, {})
    target = {"model": {"conj": torch.zeros(4, 3, dtype=torch.complex64), "imag": torch.zeros(3, 4)}}
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.load(target)
    assert torch.equal(target["model"]["conj"], x.conj().t()) and torch.equal(target["model"]["imag"], -x.imag)
    assert torch.equal(checkpoint.rest()["conj"], x.conj())


@on_ranks(2)
def test_damage_in_the_file_of_one_rank_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    """Each rank reads the file that it has written, and only one of them is damaged."""
    save(tmp_path, {"model": _sharded((1, 2), values=True)}, {}, {})
    dist.barrier()
    if rank == 0:
        with open(tmp_path / "rank-00001.safetensors", "r+b") as file:
            file.seek(-1000, io.SEEK_END)
            [byte] = file.read(1)
            file.seek(-1000, io.SEEK_END)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    with pytest.raises(ValueError, match=r"rank-00001.safetensors' is damaged: .*; load another checkpoint"):
        open_checkpoint(tmp_path).load({"model": _sharded((1, 2), values=False)})


@on_ranks(2)
def test_missing_entries_raise_unless_partial(rank: int, tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(2)}}, {}, {})
    dist.barrier()
    target = {"model": {"w": torch.zeros(2), "new": torch.zeros(3)}}
    with pytest.raises(RuntimeError, match="new"):
        open_checkpoint(tmp_path).load(target)
    open_checkpoint(tmp_path).load(target, allow_partial=True)
    assert target["model"]["w"].eq(1).all() and target["model"]["new"].eq(0).all()


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {"loops": {"state": {1: (2, 3)}}, "rng": torch.get_rng_state(), "score": torch.tensor(1.5)}
    save(tmp_path, {"model": {"w": torch.ones(2)}, "optimizer": {"lr": 0.1}}, rest, {})

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, fail)
    checkpoint = open_checkpoint(tmp_path)
    target: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "optimizer": {"lr": None}}
    checkpoint.load(target, alone=True)
    assert target["optimizer"]["lr"] == 0.1
    assert checkpoint.rest()["loops"] == {"state": {1: (2, 3)}}
    with pytest.raises(AssertionError, match="unpickled"):
        torch.load(io.BytesIO())
