"""Damaged and hostile checkpoints: each is detected, nothing of it runs, and memory stays in bounds."""

from __future__ import annotations

import collections
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ops.memory.counting import counted

from weft.strategy.checkpoint import may_be_replaced, open_checkpoint, save
from weft.strategy.checkpoint.blocks import Blocks, checksum
from weft.strategy.checkpoint.manifest import (
    _PREFIX,
    _PREFIX_BYTES,
    MANIFEST,
    OBJECTS,
    StoredChunk,
    StoredTensor,
    _check_overlap,
    has_manifest,
)

RANK_FILE = "rank-00000.safetensors"


def _state(value: float = 1.0) -> dict[str, Any]:
    """Return a state; `big` has several blocks in several panels."""
    generator = torch.Generator().manual_seed(int(value))
    big = torch.randn(256, 128, generator=generator)
    return {"model": {"big": big, "small": torch.full((3,), value)}, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}}


class _Config:
    pass


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save(folder, _state(), {"score": torch.tensor(2.0), "config": _Config(), "epoch": 1}, {})
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def _load(folder: Path) -> None:
    """Load all of a checkpoint; the objects are trusted, as only their file can be damaged."""
    checkpoint = open_checkpoint(folder, allow_pickle=True)
    state = _state()
    target = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "optimizer": dict.fromkeys(state["optimizer"]),
    }
    checkpoint.load(target, alone=True)
    for name, value in state["model"].items():
        assert torch.equal(target["model"][name], value)
    assert target["optimizer"] == state["optimizer"]
    rest = checkpoint.rest()
    assert rest["score"] == 2.0 and rest["epoch"] == 1 and type(rest["config"]) is _Config


def test_original_loads(original: Path) -> None:
    assert {file.name for file in original.iterdir()} == {RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST}
    _load(original)


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST])
def test_every_flipped_bit_is_detected_and_named(copy: Path, file: str) -> None:
    path = copy / file
    data = bytearray(path.read_bytes())
    num_bits = 8 * len(data)
    bits = range(num_bits) if num_bits < 800 else sorted({*range(0, num_bits, num_bits // 397), num_bits - 1})
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"(?s){path}.*; load another"):
            _load(copy)
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    _load(copy)


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST])
@pytest.mark.parametrize("size", ["0", "half", "one less", "one more"])
def test_other_lengths_are_detected_and_named(copy: Path, file: str, size: str) -> None:
    path = copy / file
    full = path.stat().st_size
    os.truncate(path, {"0": 0, "half": full // 2, "one less": full - 1, "one more": full + 1}[size])
    with pytest.raises(ValueError, match=rf"(?s){file}.*; load another checkpoint\."):
        _load(copy)


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS])
def test_missing_files_are_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    with pytest.raises(ValueError, match=rf"the file '{file}' is missing; load another"):
        _load(copy)


def test_missing_manifest_is_no_checkpoint(copy: Path) -> None:
    (copy / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither manifest.json nor .metadata; pass the directory of one"):
        _load(copy)


def test_swapped_files_are_detected(copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save(other, _state(2.0), {"score": torch.tensor(3.0), "config": _Config(), "epoch": 1}, {})
    for file in (RANK_FILE, "rest.safetensors"):
        assert (other / file).stat().st_size == (copy / file).stat().st_size
        kept = (copy / file).read_bytes()
        shutil.copy(other / file, copy / file)
        with pytest.raises(
            ValueError, match=rf"{file}' is damaged: (block 0 of '.*', which begins|the checksums of '.*', wh)"
        ):
            _load(copy)
        (copy / file).write_bytes(kept)
    shutil.copy(other / MANIFEST, copy / MANIFEST)
    with pytest.raises(ValueError, match="is damaged"):
        _load(copy)


def test_files_that_are_links_are_not_followed(copy: Path, tmp_path: Path) -> None:
    (copy / RANK_FILE).rename(tmp_path / "elsewhere")
    (copy / RANK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is no regular file"):
        _load(copy)


def test_damage_is_read_if_checksums_are_skipped(copy: Path) -> None:
    start = json.loads((copy / MANIFEST).read_text())["tensors"]["model.small"]["chunks"][0]["start"]
    data = bytearray((copy / RANK_FILE).read_bytes())
    data[start + 3] ^= 0x80  # the sign of the first element
    (copy / RANK_FILE).write_bytes(data)
    target = {"model": {"small": torch.zeros(3), "big": torch.zeros(256, 128)}}
    open_checkpoint(copy, verify=False).load(target, alone=True)
    assert target["model"]["small"].tolist() == [-1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="is damaged"):
        open_checkpoint(copy).load(target, alone=True)


# ---- manifests with the right checksum


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    change(content)
    _write(folder, json.dumps(content)[1:])


def _write(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_bytes(_PREFIX % checksum(text.encode()) + text.encode())


def _tensor(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["model.big"]


def _chunk(content: dict[str, Any]) -> dict[str, Any]:
    return _tensor(content)["chunks"][0]


def _rename(content: dict[str, Any], name: str) -> None:
    content["files"][name] = content["files"].pop(RANK_FILE)
    for tensor in content["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = name


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path as file": lambda c: _rename(c, "../original/" + RANK_FILE),
    "an absolute file": lambda c: _rename(c, "/etc/passwd"),
    "a hidden file": lambda c: _rename(c, ".secret"),
    "an unknown file": lambda c: _chunk(c).update(file="other"),
    "the manifest as file": lambda c: c["files"].update({MANIFEST: c["files"][OBJECTS]}),
    "a huge shape": lambda c: _tensor(c).update(shape=[1 << 40, 1 << 20]),
    "a huge tensor and chunk": lambda c: (
        _tensor(c).update(shape=[1 << 62]),
        _chunk(c).update(shape=[1 << 62], offsets=[0], panels=1, block_rows=1 << 62),
    ),
    "a shape beyond 64 bits": lambda c: _tensor(c).update(shape=[1 << 70]),
    "a negative shape": lambda c: _tensor(c).update(shape=[-256, -128]),
    "a float as shape": lambda c: _tensor(c).update(shape=[256.0, 128]),
    "a boolean as shape": lambda c: _tensor(c).update(shape=[True, 32768]),
    "a text as shape": lambda c: _tensor(c).update(shape="12"),
    "an offset": lambda c: _chunk(c).update(offsets=[1, 0]),
    "a start": lambda c: _chunk(c).update(start=_chunk(c)["start"] + 1),
    "a start beyond the file": lambda c: _chunk(c).update(start=1 << 50),
    "no chunk": lambda c: _tensor(c).update(chunks=[]),
    "the chunk twice": lambda c: _tensor(c).update(chunks=[_chunk(c)] * 2),
    "overlapping chunks": lambda c: _split(c, [[0], [0]]),
    "no panels": lambda c: _chunk(c).update(panels=0),
    "panels that do not divide": lambda c: _chunk(c).update(panels=3),
    "blocks without rows": lambda c: _chunk(c).update(block_rows=0),
    "many checksums": lambda c: _chunk(c).update(block_rows=1),
    "a wrong checksum": lambda c: _chunk(c).update(checksum="0123456789abcdef"),
    "no number as checksum": lambda c: _chunk(c).update(checksum="%"),
    "another table": lambda c: _chunk(c).update(table=_chunk(c)["table"] - 8),
    "a table beyond the file": lambda c: _chunk(c).update(table=1 << 50),
    "a dtype that is a module": lambda c: _tensor(c).update(dtype="_inductor"),
    "a quantized dtype": lambda c: _tensor(c).update(dtype="quint8"),
    "another dtype": lambda c: _tensor(c).update(dtype="float64"),
    "a function as dtype": lambda c: _tensor(c).update(dtype="load"),
    "a dtype with dots": lambda c: _tensor(c).update(dtype="nn.Module"),
    "a longer header": lambda c: c["files"][RANK_FILE].update(header_bytes=1 << 30),
    "another header": lambda c: c["files"][RANK_FILE].update(header_checksum=0),
    "a file's size": lambda c: c["files"][RANK_FILE].update(num_bytes=1),
    "a further field": lambda c: c["files"][RANK_FILE].update(code=1),
    "no tensors": lambda c: c.pop("tensors"),
    "a list of tensors": lambda c: c.update(tensors=[]),
    "no file": lambda c: c.update(files={}),
    "a later version": lambda c: c.update(version=2),
    "another algorithm": lambda c: c.update(algorithm="none"),
    "another format": lambda c: c.update(format="tar"),
    "objects without a file": lambda c: c["files"].pop(OBJECTS),
    "a file without objects": lambda c: c.update(objects=[]),
    "an unknown kind": lambda c: c.update(rest={"$call": "os.system"}),
    "a far tensor": lambda c: c.update(rest={"$tensor": 10**6}),
    "a far object": lambda c: c.update(rest={"$object": 10**6}),
    "a list as rest": lambda c: c.update(rest=[]),
    "a value of an unknown kind": lambda c: c["values"]["optimizer.lr"].update(value={"$eval": "1"}),
    "a path of floats": lambda c: c["values"]["optimizer.lr"].update(path=[0.5]),
    "no path": lambda c: c["values"]["optimizer.lr"].update(path=[]),
    "another path": lambda c: c["values"]["optimizer.lr"].update(path=["model", "lr"]),
    "a path in a tensor": lambda c: c["values"].update({"model.big.lr": {"path": ["model", "big", "lr"], "value": 1}}),
    "a path twice": lambda c: c["values"].update({"model.big": {"path": ["model", "big"], "value": 1}}),
    "a long path": lambda c: c["values"].update({".".join("a" * 200): {"path": ["a"] * 200, "value": 1}}),
    "a tensor twice in rest": lambda c: c.update(rest={"a": {"$tensor": 0}, "b": {"$tensor": 0}}),
    "a text as mesh": lambda c: c["about"].update(mesh="abc"),
    "a list as plan": lambda c: c["about"].update(plan=[1]),
}


def _split(content: dict[str, Any], offsets: list[list[int]]) -> None:
    """Replace the chunk of the small tensor by two, of one and of two elements, with these offsets."""
    tensor = content["tensors"]["model.small"]
    [chunk] = tensor["chunks"]
    first = {**chunk, "shape": [1], "block_rows": 1, "offsets": offsets[0]}
    second = {**chunk, "shape": [2], "block_rows": 2, "offsets": offsets[1], "start": chunk["start"] + 4}
    tensor["chunks"] = [first, second]


def test_chunks_that_do_not_overlap_are_accepted(copy: Path) -> None:
    """So the case of overlapping chunks raises an error because they overlap."""
    _edit(copy, lambda content: _split(content, [[0], [1]]))
    open_checkpoint(copy)
    _edit(copy, lambda content: content["tensors"]["model.small"]["chunks"][1].update(offsets=[0]))
    with pytest.raises(ValueError, match=r"two chunks of 'model\.small' overlap"):
        open_checkpoint(copy)


def test_too_many_chunks_raise(copy: Path) -> None:
    chunks = [
        {**_chunk(json.loads((copy / MANIFEST).read_text())), "panels": 1, "shape": [1], "offsets": [i]}
        for i in range(70000)
    ]
    _edit(copy, lambda content: _tensor(content).update(shape=[70000], chunks=chunks))
    with pytest.raises(ValueError, match="has 70000 chunks, and 65536 are the most"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("boxes", "covers"),
    [
        ([((0, 0, 0), (2, 3, 4))], True),
        ([((0, 0, 0), (2, 3, 2)), ((0, 0, 2), (2, 3, 2))], True),
        ([((0, 0, 0), (2, 3, 2)), ((0, 0, 0), (2, 3, 2))], False),
        ([((0, 0, 0), (1, 3, 4)), ((1, 0, 0), (1, 1, 4)), ((1, 1, 0), (1, 2, 4))], True),
        ([((0, 0, 0), (1, 3, 4)), ((1, 0, 0), (1, 1, 4)), ((0, 1, 0), (1, 2, 4))], False),
        ([((i, j, 0), (1, 1, 4)) for i in range(2) for j in range(3)], True),
        ([((i, max(j - 1, 0), 0), (1, 1, 4)) for i in range(2) for j in range(3)], False),
    ],
)
def test_cover_is_exact(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], covers: bool) -> None:
    chunks = tuple(StoredChunk(offsets, "file", 0, Blocks(shape, 4, 1, 1), 0, 0) for offsets, shape in boxes)
    tensor = StoredTensor((), torch.float32, (2, 3, 4), chunks)
    if covers:
        _check_overlap("x", tensor)
    else:
        with pytest.raises(ValueError, match="two chunks of 'x' overlap"):
            _check_overlap("x", tensor)


@pytest.mark.parametrize("name", EDITS)
def test_hostile_manifests_raise(copy: Path, name: str) -> None:
    """The memory for the tensors and for reading is at most twice the size of the files."""
    _edit(copy, EDITS[name])
    state = _state()
    own = 2 * sum(value.nbytes for value in state["model"].values())  # what `_load` itself needs to compare
    with counted() as count, pytest.raises(ValueError, match=r"; (load another|pass )"):
        _load(copy)
    assert count.peak() - own <= 2 * sum(file.lstat().st_size for file in copy.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 100_000 + "]" * 100_000,
        '"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '"format": "weft checkpoint", "format": "weft checkpoint"}',
        '"format": NaN}',
        '"format": ' + "9" * 5000 + "}",
        '"format": "weft checkpoint", "version": 1}',
        "\x00\xff",
    ],
    ids=range(9),
)
def test_other_texts_raise(copy: Path, text: str) -> None:
    _write(copy, text)
    with pytest.raises(ValueError, match=r"manifest.json' cannot be used: .*; load another checkpoint"):
        _load(copy)


# ---- pickles


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that makes a file when it is loaded."""
    evidence = tmp_path / "evidence"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(evidence),)

    yield pickle.dumps(Bomb())
    assert not evidence.exists()


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST])
def test_pickles_in_files_do_not_run(copy: Path, bomb: bytes, file: str) -> None:
    size = (copy / file).stat().st_size
    (copy / file).write_bytes(bomb.ljust(size, b"\0"))
    with pytest.raises(ValueError, match="; load another"):
        _load(copy)


def test_pickle_with_its_checksum_does_not_run(copy: Path, bomb: bytes) -> None:
    (copy / OBJECTS).write_bytes(bomb)
    entry = {"num_bytes": len(bomb), "header_bytes": len(bomb), "header_checksum": f"{checksum(bomb):016x}"}
    _edit(copy, lambda content: content["files"].update({OBJECTS: entry}))
    with pytest.raises(ValueError, match=r"run code: config; pass allow_pickle=True, an argument"):
        open_checkpoint(copy).rest()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A directory as weft 0.1 wrote it."""
    folder = tmp_path / "old"
    dcp.save(_state(), checkpoint_id=folder)
    torch.save({"epoch": 1}, folder / "meta.pt")
    return folder


def _load_old(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    target = {"model": {"big": torch.zeros(256, 128), "small": torch.zeros(3)}, "optimizer": {"lr": 0, "betas": 0}}
    checkpoint.load(target, alone=True)
    assert torch.equal(target["model"]["big"], _state()["model"]["big"])
    assert target["optimizer"] == _state()["optimizer"]
    assert checkpoint.rest() == {"epoch": 1}


def test_old_directories_load(old: Path) -> None:
    _load_old(old)


@pytest.mark.parametrize("file", [".metadata", "meta.pt", "__0_0.distcp"])
def test_pickles_in_old_directories_do_not_run(old: Path, bomb: bytes, file: str) -> None:
    (old / file).write_bytes(bomb)
    with pytest.raises((ValueError, RuntimeError)):
        _load_old(old)


def test_pickled_values_of_old_directories_do_not_run(old: Path, bomb: bytes) -> None:
    """A value that is no tensor is a file of torch.save inside the file of shards."""
    metadata = dcp.FileSystemReader(old).read_metadata()
    [info] = [info for index, info in metadata.storage_data.items() if index.fqn == "optimizer.lr"]
    data = bytearray((old / info.relative_path).read_bytes())
    with open(old / "bomb", "wb") as file:
        torch.save(pickle.loads, file)  # a global that weights_only does not know
    evil = (old / "bomb").read_bytes()
    (old / "evil.distcp").write_bytes(evil)
    info.relative_path, info.offset, info.length = "evil.distcp", 0, len(evil)
    (old / ".metadata").write_bytes(pickle.dumps(metadata))
    assert data
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


def test_checkpoints_of_two_saves_in_one_directory_raise(copy: Path) -> None:
    (copy / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has manifest.json and .metadata, of two saves; remove the older one"):
        open_checkpoint(copy)


def test_other_manifests_are_recognised(copy: Path, tmp_path: Path) -> None:
    assert has_manifest(copy) and may_be_replaced(copy)
    for text in ("{}", '{"name": "app"}', ""):
        (copy / MANIFEST).write_text(text)
        assert not has_manifest(copy) and not may_be_replaced(copy)
    assert not has_manifest(tmp_path) and not may_be_replaced(tmp_path) and may_be_replaced(tmp_path / "new")


def test_prefix_has_its_length() -> None:
    assert len(_PREFIX % checksum(b"abc")) == _PREFIX_BYTES
