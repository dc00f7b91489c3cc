"""Hostile manifests and pickles: each raises, nothing of it runs, and memory stays in bounds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ops.memory.counting import counted
from strategy.checkpoint.saved import RANK_FILE, edit, load, state_of, write

from weft.strategy.checkpoint import may_be_replaced, open_checkpoint
from weft.strategy.checkpoint.blocks import Blocks, checksum
from weft.strategy.checkpoint.file_names import MANIFEST, OBJECTS
from weft.strategy.checkpoint.manifest import (
    _PREFIX,
    _PREFIX_BYTES,
    StoredChunk,
    StoredTensor,
    _check_overlap,
    has_manifest,
)


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
    "another header": lambda c: c["files"][RANK_FILE].update(header_checksum="0" * 16),
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
    edit(copy, lambda content: _split(content, [[0], [1]]))
    open_checkpoint(copy)
    edit(copy, lambda content: content["tensors"]["model.small"]["chunks"][1].update(offsets=[0]))
    with pytest.raises(ValueError, match=r"two chunks of 'model\.small' overlap"):
        open_checkpoint(copy)


def test_too_many_chunks_raise(copy: Path) -> None:
    chunks = [
        {**_chunk(json.loads((copy / MANIFEST).read_text())), "panels": 1, "shape": [1], "offsets": [i]}
        for i in range(70000)
    ]
    edit(copy, lambda content: _tensor(content).update(shape=[70000], chunks=chunks))
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
    edit(copy, EDITS[name])
    state = state_of()
    own = 2 * sum(value.nbytes for value in state["model"].values())  # of the tensors in `load` itself
    with counted() as count, pytest.raises(ValueError, match=r"; (load another|pass )"):
        load(copy)
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
    write(copy, text)
    with pytest.raises(ValueError, match=r"manifest.json' cannot be used: .*; load another checkpoint"):
        load(copy)


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST])
def test_pickles_in_files_do_not_run(copy: Path, bomb: object, file: str) -> None:
    size = (copy / file).stat().st_size
    (copy / file).write_bytes(pickle.dumps(bomb).ljust(size, b"\0"))
    with pytest.raises(ValueError, match="; load another"):
        load(copy)


def test_pickle_with_its_checksum_does_not_run(copy: Path, bomb: object) -> None:
    data = pickle.dumps([pickle.dumps(bomb)])
    (copy / OBJECTS).write_bytes(data)
    entry = {"num_bytes": len(data), "header_bytes": len(data), "header_checksum": f"{checksum(data):016x}"}
    edit(copy, lambda content: content["files"].update({OBJECTS: entry}))
    with pytest.raises(ValueError, match=r"run code: config; pass allow_pickle=True, an argument"):
        open_checkpoint(copy).rest()


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
