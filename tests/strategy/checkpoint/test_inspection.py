"""weft verify and weft inspect, as functions and as commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from weft.strategy.checkpoint import inspect, save, verify
from weft_command import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    path.mkdir()
    about = {"weft": "1.2.3", "torch": "4.5", "mesh": {"tensor_parallel": 2}, "plan": "auto"}
    state = {"model": {"w": torch.randn(300, 256), "b": torch.ones(3)}, "optimizer_0": {"lr": 0.1}}
    save(path, state, {"epoch": 1, "score": torch.ones(())}, about)
    return path


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["weft", *arguments])
    return main()


def _flip(path: Path, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        [value] = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 4]))


def test_contents(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    contents = inspect(folder)
    rows = [(row.name, row.dtype, row.shape, row.num_bytes, row.num_chunks) for row in contents.tensors]
    assert rows == [("model.b", "float32", (3,), 12, 1), ("model.w", "float32", (300, 256), 307_200, 1)]
    assert contents.num_values == 1 and contents.num_bytes == 307_212 and contents.pickled == ()
    assert dict(contents.files) == {
        name: (folder / name).stat().st_size for name in ("rank-00000.safetensors", "rest.safetensors")
    }
    assert _run(monkeypatch, "inspect", str(folder)) == 0
    table = capsys.readouterr().out
    assert "2 tensors, 307.21 kB, in 2 files" in table
    assert "written by weft 1.2.3 with torch 4.5, mesh: tensor_parallel=2, plan: auto" in table
    assert "model.w  float32     300x256            307.20 kB       1" in table
    assert _run(monkeypatch, "inspect", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(contents.to_dict()))


def test_verify(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder) == []
    assert _run(monkeypatch, "verify", str(folder)) == 0
    total = sum(size for _, size in inspect(folder).files)
    assert capsys.readouterr().out == f"{folder}: all 2 files agree with their checksums ({total:,} bytes)\n"


def test_each_damage_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "rank-00000.safetensors"
    _flip(file, 20)  # in the header
    _flip(file, file.stat().st_size - 1)
    _flip(folder / "rest.safetensors", (folder / "rest.safetensors").stat().st_size - 1)
    header, tensor, rest = verify(folder)
    assert "rank-00000.safetensors" in header and "its first" in header
    assert "rank-00000.safetensors" in tensor and "of 'model." in tensor
    assert "rest.safetensors" in rest and "tensor 0 of the other entries" in rest
    assert _run(monkeypatch, "verify", str(folder)) == 1
    assert capsys.readouterr().err.count("weft verify: the checkpoint's file ") == 3
    os.truncate(file, 100)
    assert _run(monkeypatch, "verify", str(folder)) == 1
    assert "the file 'rank-00000.safetensors' has 100 bytes" in capsys.readouterr().err


def test_other_paths_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "inspect"):
        assert _run(monkeypatch, command, str(tmp_path)) == 2
        assert f"weft {command}: got '{tmp_path}', which has no manifest.json; pass a" in capsys.readouterr().err
