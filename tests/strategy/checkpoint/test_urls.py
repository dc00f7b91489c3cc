"""Checkpoints at URLs: a server of S3 in this process, and the memory of fsspec."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from support.object_store import BUCKET, ObjectStore, use
from support.processes import run_on_forks
from support.ranks import on_ranks
from weft.lightning import newest_checkpoint
from weft.strategy import checkpoint as checkpoints
from weft.strategy import durable
from weft.strategy.checkpoint import (
    check_ranks,
    joined,
    location_of,
    may_be_replaced,
    open_checkpoint,
    remote,
    verify,
)
from weft.strategy.checkpoint.blocks import checksum
from weft.strategy.checkpoint.file_names import MANIFEST
from weft.strategy.checkpoint.manifest import _PREFIX
from weft_command import main

OLD, NEW = 1.0, 2.0


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    use(store.endpoint).mkdir(BUCKET)
    yield store
    store.close()


@pytest.fixture
def url(store: ObjectStore, request: pytest.FixtureRequest) -> str:
    """Return a URL below which nothing is, and let this process use the store."""
    use(store.endpoint)
    store.requests.clear()
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}/last.ckpt"


def _save(where: Any, value: float, **tensors: torch.Tensor) -> None:
    location = location_of(where)
    assert may_be_replaced(location)
    written = checkpoints.begin(location)
    checkpoints.save(written, {"model": {"w": torch.full((20, 3), value), **tensors}}, {"value": value}, {})
    checkpoints.publish(written, location)


def _loaded(where: Any) -> float:
    """Return the value of a complete checkpoint."""
    checkpoint = open_checkpoint(where)
    target = {"model": {"w": torch.zeros(20, 3)}}
    checkpoint.load(target, allow_partial=True, alone=True)
    value = target["model"]["w"][0, 0].item()
    assert target["model"]["w"].eq(value).all() and checkpoint.rest() == {"value": value}
    return value


def _names(where: str) -> list[str]:
    """Return the names of the files of a checkpoint, without the save's token."""
    return sorted(name.partition("-")[2] or name for name in location_of(where).entries())


@on_ranks(2)
def test_ranks_save_and_any_number_loads(rank: int, world_size: int, store_endpoint: str) -> None:
    use(store_endpoint)
    url = f"s3://{BUCKET}/ranks/last.ckpt"
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))

    def state(value: float, dim: int) -> dict[str, Any]:
        local = torch.full((8, 6) if dim == 0 else (16, 3), value)
        moment = DTensor.from_local(local * 2, mesh, [Shard(dim)])
        return {
            "model": {"w": DTensor.from_local(local, mesh, [Shard(dim)])},
            "optimizer_0": {"m": moment, "lr": value},
        }

    for save in range(2):  # the second replaces the first
        location = location_of(url)
        written = checkpoints.begin(location)
        checkpoints.save(written, state(rank + 1.0 + save, 0), {"save": save}, {})
        checkpoints.publish(written, location)
    dist.barrier()
    assert _names(url) == [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]
    expected = torch.cat([torch.full((8, 6), 2.0), torch.full((8, 6), 3.0)])
    target = state(-1.0, 1)  # sharded by the other dim
    opened = open_checkpoint(url)
    opened.load(target)
    assert torch.equal(target["model"]["w"].full_tensor(), expected) and opened.rest() == {"save": 1}
    assert torch.equal(target["optimizer_0"]["m"].full_tensor(), 2 * expected)
    full = {"model": {"w": torch.zeros(16, 6)}, "optimizer_0": {"m": torch.zeros(16, 6)}}
    open_checkpoint(url).load(full, alone=True)
    assert torch.equal(full["model"]["w"], expected) and torch.equal(full["optimizer_0"]["m"], 2 * expected)
    dist.barrier()


@on_ranks(2)
def test_memory_of_one_process_is_refused_on_more_ranks(rank: int, world_size: int) -> None:
    for call in (check_ranks, checkpoints.begin):
        with pytest.raises(
            ValueError, match=r"^got the checkpoint 'memory://a', which is in the memory of one process"
        ):
            call(location_of("memory://a"))
    assert not location_of("memory://a").entries()


@pytest.fixture
def store_endpoint(store: ObjectStore) -> str:
    return store.endpoint


def test_reads_only_the_bytes_of_what_is_loaded(url: str, store: ObjectStore) -> None:
    other = torch.arange(3 << 20, dtype=torch.float32)
    _save(url, OLD, other=other)
    store.requests.clear()
    assert _loaded(url) == OLD
    num_read = [each.num_returned for each in store.requests if each.path.endswith(".safetensors")]
    assert sum(num_read) < 20 * 3 * 4 + 2000  # headers
    store.requests.clear()
    target = {"model": {"other": torch.zeros_like(other)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.RemoteInputFiles, "max_bytes", 5 << 20)
        open_checkpoint(url).load(target, allow_partial=True, alone=True)
    assert torch.equal(target["model"]["other"], other)
    num_read = [each.num_returned for each in store.requests if each.path.endswith("rank-00000.safetensors")]
    assert max(num_read) <= 5 << 20 and other.nbytes < sum(num_read) < 1.05 * other.nbytes


def test_large_files_are_uploaded_in_parts(url: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", 5 << 20)
    big = torch.arange(3 << 20, dtype=torch.float32)  # 12 MiB
    _save(url, OLD, big=big)
    parts = [each.num_sent for each in store.requests if "partNumber=" in each.query]
    assert len(parts) == 3 and sum(parts) > big.nbytes and max(parts) < 7 << 20
    assert verify(url) == []

    def fail(name: str) -> None:
        if name == "complete":
            raise OSError("no connection")

    store.requests.clear()
    monkeypatch.setattr(durable, "before_call", fail)
    with pytest.raises(OSError, match=r"^no connection$"):
        _save(url, NEW, big=big)
    assert [each.method for each in store.requests if "uploadId=" in each.query] == ["PUT", "PUT", "DELETE"]  # aborted
    assert _loaded(url) == OLD


@pytest.mark.parametrize("protocol", ["s3", "memory"])
@pytest.mark.filterwarnings("ignore:weft.*cannot be removed")
def test_failed_save_leaves_old_or_new(url: str, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that changes the store fails once; the next save removes what is left."""
    url = url.replace("s3://", f"{protocol}://")
    complete = [MANIFEST, "rank-00000.safetensors"]
    found = []
    for number in itertools.count():
        location_of(url).remove()
        _save(url, OLD)
        calls = itertools.count()

        def fail(name: str, calls: Iterator[int] = calls, number: int = number) -> None:
            if next(calls) == number:
                raise OSError(f"failed {name}")

        with monkeypatch.context() as patch:
            patch.setattr(durable, "before_call", fail)
            with contextlib.suppress(OSError):
                _save(url, NEW)
        found.append(_loaded(url))
        if next(calls) <= number:
            break
        _save(url, NEW)
        assert _loaded(url) == NEW and _names(url) == complete
    # A file has a header and values. The removal of the old files fails with a warning.
    assert found == [OLD, OLD, OLD, OLD, OLD, NEW, NEW]  # create, write, write, complete, put, remove, no failure


def _save_and_die(rank: int, url: str, endpoint: str, victim: int, number: int) -> None:
    use(endpoint)
    calls = itertools.count()

    def count(_: str) -> None:
        if next(calls) == number:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    if rank == victim:
        durable.before_call = count
    location = location_of(url)
    written = checkpoints.begin(location)
    state = {"model": {"w": torch.full((20, 3), NEW), "v": torch.full((30, 3), NEW)}}
    checkpoints.save(written, state, {"value": NEW}, {})
    checkpoints.publish(written, location)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_ranks_leave_old_or_new(url: str, store: ObjectStore, victim: int) -> None:
    """Ranks are killed before each operation that changes the store; killed in the first save, they leave nothing."""
    _save(url, OLD)
    found: list[float] = []
    number = 0
    while (statuses := run_on_forks(2, _save_and_die, url, store.endpoint, victim, number)) != [0, 0]:
        assert statuses == [-signal.SIGKILL] * 2
        found.append(_loaded(url))
        if found[-1] == NEW:
            _save(url, OLD)
        number += 1
    assert len(found) > 3 and found[:-1] == [OLD] * (len(found) - 1)
    assert found[-1] == (NEW if victim == 0 else OLD)  # before the old files are removed, or its file is complete
    assert _loaded(url) == NEW
    assert _names(url) == [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]
    location_of(url).remove()
    run_on_forks(2, _save_and_die, url, store.endpoint, 0, 2)
    with pytest.raises(FileNotFoundError, match=rf"^got '{url}', which has no manifest.json"):
        open_checkpoint(url)
    _save(url, OLD)
    assert _loaded(url) == OLD and len(_names(url)) == 2


def test_foreign_objects_are_kept(url: str) -> None:
    files = location_of(url).file_system
    foreign = f"{url}/notes.txt"
    files.pipe_file(foreign, b"mine")
    assert not may_be_replaced(url)
    files.rm_file(foreign)
    files.pipe_file(f"{url}/{MANIFEST}", b'{"format": "another"}')
    assert not may_be_replaced(url)
    files.rm_file(f"{url}/{MANIFEST}")
    files.pipe_file(f"{url}/{'0' * 16}-rank-00003.safetensors", b"left by a killed save")
    _save(url, OLD)
    files.pipe_file(foreign, b"mine")
    _save(url, NEW)
    assert _loaded(url) == NEW and files.cat_file(foreign) == b"mine" and len(_names(url)) == 3
    location_of(url).remove()
    assert list(location_of(url).entries()) == ["notes.txt"]


def test_damage_is_found_and_named(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    _save(url, OLD)
    location = location_of(url)
    [name] = [name for name in location.entries() if name.endswith(".safetensors")]
    monkeypatch.setattr("sys.argv", ["weft", "verify", url])
    assert main() == 0 and f"{url}: all 1 files agree" in capsys.readouterr().out
    path = location.path_of(name)
    data = bytearray(location.file_system.cat_file(path))
    for change in ("flipped", "truncated", "missing"):
        if change == "flipped":
            data[-30] ^= 1
            location.put(name, bytes(data))
        elif change == "truncated":
            location.put(name, bytes(data[:-1]))
        else:
            location.file_system.rm_file(path)
        with pytest.raises(ValueError, match=name):
            _loaded(url)
        assert main() == 1 and name in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../a", "/a", "a::b", "s3://bucket/a", "a/b"])
def test_manifests_name_no_files_elsewhere(url: str, name: str) -> None:
    _save(url, OLD)
    location = location_of(url)
    text = location.read(MANIFEST)[len(_PREFIX % 0) :].decode()
    [file] = json.loads("{" + text)["files"]
    changed = text.replace(f'"{file}"', json.dumps(name)).encode()
    location.put(MANIFEST, _PREFIX % checksum(changed) + changed)
    with pytest.raises(ValueError, match=rf"it lists the file '{name}', which is no name of a checkpoint's file"):
        open_checkpoint(url)


def test_urls_of_files_are_paths(tmp_path: Path) -> None:
    _save(f"file://{tmp_path}/last.ckpt", OLD)
    assert os.listdir(tmp_path) == ["last.ckpt"] and _loaded(tmp_path / "last.ckpt") == OLD
    assert _loaded(f"file://{tmp_path}/last.ckpt") == OLD
    assert str(joined(f"file://{tmp_path}", "a")) == str(tmp_path / "a") and str(joined("s3://b/", "a")) == "s3://b/a"


def test_wrong_urls_raise_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"got PosixPath\('s3:/b/a'\), in which a URL has lost a slash; pass"):
        location_of(Path("s3://b/a"))
    with pytest.raises(ValueError, match=r"got the chain of URLs 'zip://a::s3://b/c'; pass the URL of one file"):
        location_of("zip://a::s3://b/c")
    with pytest.raises(ValueError, match=r"got the checkpoint 'unknown://a', which fsspec cannot use .*; pass the URL"):
        open_checkpoint("unknown://a")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.core.url_to_fs", _raise_missing)
    with pytest.raises(ImportError, match=r"got the checkpoint 's3://b/a', which needs a package .*: Install s3fs to"):
        verify("s3://b/a")


def _raise_missing(*_: Any, **__: Any) -> None:
    raise ImportError("Install s3fs to access S3")


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return fsspec's file system in memory, empty before and after the test."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


@pytest.mark.filterwarnings("error:weft")
def test_names_are_no_patterns(memory: Any) -> None:
    """A "[" is usual in the names of runs; what it matches as a pattern is another checkpoint's."""
    for value in (OLD, NEW):
        _save("memory://run1/last.ckpt", value)
        _save("memory://run[12]/last.ckpt", value)
    assert _names("memory://run[12]/last.ckpt") == [MANIFEST, "rank-00000.safetensors"]
    location_of("memory://run[12]/last.ckpt").remove()
    assert _names("memory://run[12]/last.ckpt") == [] and _loaded("memory://run1/last.ckpt") == NEW


def test_errors_of_a_store_do_not_hide_a_checkpoint(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _save("memory://folder/last.ckpt", NEW)
    url = newest_checkpoint("memory://folder")
    assert url is not None and _loaded(url) == NEW

    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError("the token has expired")

    for name in ("cat_file", "info"):
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), name, deny)
            with pytest.raises(PermissionError):
                newest_checkpoint("memory://folder") if name == "cat_file" else location_of(url).is_used()
    memory.pipe_file("/folder/other.ckpt/manifest.json", b"")
    assert newest_checkpoint("memory://folder") == url


def test_file_replaces_a_directory(url: str) -> None:
    _save(url, OLD)
    location_of(url).write_file(lambda file: file.write(b"content"))
    assert not location_of(url).is_directory() and location_of(url).is_used() and _names(url) == []


@pytest.mark.parametrize("text", ["simplecache::s3://bucket/x", "filecache::memory://a", "s3://a::memory://b"])
def test_chains_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"got the chain of URLs '.*'; pass the URL of one file system"):
        location_of(text)


def test_stores_without_objects_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got the checkpoint 'sftp://host/x', and sftp does not replace a file at"):
        location_of("sftp://host/x").is_used()
    assert str(location_of("memory://")) == "memory://" and str(location_of("s3://bucket/x/")) == "s3://bucket/x"
