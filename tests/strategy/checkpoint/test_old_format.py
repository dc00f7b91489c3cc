"""Directories of weft 0.1 and Lightning: they load, and their pickles do not run."""

from __future__ import annotations

import collections
import io
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from strategy.checkpoint.saved import state_of
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from weft.strategy.checkpoint import open_checkpoint


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A directory as weft 0.1 wrote it."""
    folder = tmp_path / "old"
    dcp.save(state_of(), checkpoint_id=folder)
    torch.save({"epoch": 1}, folder / "meta.pt")
    return folder


def _load_old(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    target = {"model": {"big": torch.zeros(256, 128), "small": torch.zeros(3)}, "optimizer": {"lr": 0, "betas": 0}}
    checkpoint.load(target, alone=True)
    assert torch.equal(target["model"]["big"], state_of()["model"]["big"])
    assert target["optimizer"] == state_of()["optimizer"]
    assert checkpoint.rest() == {"epoch": 1}


def test_old_directories_load(old: Path) -> None:
    _load_old(old)


@pytest.mark.parametrize("by_getattr", [False, True])
def test_members_of_enums_load(old: Path, monkeypatch: pytest.MonkeyPatch, by_getattr: bool) -> None:
    """Python 3.11.0 to 3.11.3 pickles a member as a call of getattr, other versions as a call of its class."""
    metadata = dcp.FileSystemReader(old).read_metadata()
    reduced = (lambda self, _: (getattr, (type(self), self.name))) if by_getattr else _by_value
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    _load_old(old)


@pytest.mark.parametrize(
    "reduced", [(Path, "open"), (TensorProperties, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")]
)
def test_attributes_of_other_objects_do_not_load(old: Path, reduced: tuple[Any, str]) -> None:
    metadata = dcp.FileSystemReader(old).read_metadata()
    metadata.storage_data = _Patch(getattr, reduced)
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"it refers to (an attribute of an object|pathlib\.Path), which no list of"):
        open_checkpoint(old)


def _by_value(member: Any, _: int) -> tuple[Any, ...]:
    return (type(member), (member.value,))


@pytest.mark.parametrize("file", [".metadata", "meta.pt", "__0_0.distcp"])
def test_pickles_in_old_directories_do_not_run(old: Path, bomb: object, file: str) -> None:
    (old / file).write_bytes(pickle.dumps(bomb))
    with pytest.raises((ValueError, RuntimeError)):
        _load_old(old)


def test_pickled_values_of_old_directories_do_not_run(old: Path, bomb: object) -> None:
    """A value that is no tensor is a file of torch.save inside the file of shards."""
    metadata = dcp.FileSystemReader(old).read_metadata()
    [info] = [info for index, info in metadata.storage_data.items() if index.fqn == "optimizer.lr"]
    buffer = io.BytesIO()
    torch.save(bomb, buffer)
    evil = buffer.getvalue()
    (old / "evil.distcp").write_bytes(evil)
    info.relative_path, info.offset, info.length = "evil.distcp", 0, len(evil)
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"value 'optimizer.lr' has Python objects \(.*\); pass allow_pickle=True"):
        _load_old(old)


def test_old_list_of_shards_names_no_files_outside(old: Path) -> None:
    metadata = dcp.FileSystemReader(old).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../other/__0_0.distcp"
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"it names the file '\.\./other/__0_0.distcp'; load another checkpoint"):
        _load_old(old)


class _Patch:
    """Pickles as a call or a change that the list of shards does not need."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def test_old_list_of_shards_changes_no_classes(old: Path) -> None:
    metadata = dcp.FileSystemReader(old).read_metadata()
    files = metadata.storage_data
    for data in (
        collections.OrderedDict(files),
        _Patch(set, (), {"values": set}),
        _Patch(set, ([],), (None, {"x": 1})),
    ):
        metadata.storage_data = data
        (old / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=r"list of shards '.*\.metadata' cannot be used: .*; load another"):
            open_checkpoint(old)
    metadata.storage_data = dict.fromkeys(files, _Patch(type(Path()), ("a",)))
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="it has something else in place of a file"):
        open_checkpoint(old)


def test_old_list_of_shards_allocates_no_more_than_it_has(old: Path) -> None:
    (old / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")  # puts None at index 2**31 - 1 of the memo
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has a NoneType; load another"):
            open_checkpoint(old)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
