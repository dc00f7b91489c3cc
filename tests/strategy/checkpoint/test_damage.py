"""Damaged checkpoints: each flipped bit, other length, and missing or exchanged file is detected and named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from strategy.checkpoint.saved import RANK_FILE, load, save_to

from weft.strategy.checkpoint import open_checkpoint
from weft.strategy.checkpoint.file_names import MANIFEST, OBJECTS


def test_original_loads(original: Path) -> None:
    assert {file.name for file in original.iterdir()} == {RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST}
    load(original)


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
            load(copy)
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    load(copy)


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS, MANIFEST])
@pytest.mark.parametrize("size", ["0", "half", "one less", "one more"])
def test_other_lengths_are_detected_and_named(copy: Path, file: str, size: str) -> None:
    path = copy / file
    full = path.stat().st_size
    os.truncate(path, {"0": 0, "half": full // 2, "one less": full - 1, "one more": full + 1}[size])
    with pytest.raises(ValueError, match=rf"(?s){file}.*; load another checkpoint\."):
        load(copy)


@pytest.mark.parametrize("file", [RANK_FILE, "rest.safetensors", OBJECTS])
def test_missing_files_are_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    with pytest.raises(ValueError, match=rf"the file '{file}' is missing; load another"):
        load(copy)


def test_missing_manifest_is_no_checkpoint(copy: Path) -> None:
    (copy / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither manifest.json nor .metadata; pass the directory of one"):
        load(copy)


def test_swapped_files_are_detected(copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_to(other, 2.0)
    for file in (RANK_FILE, "rest.safetensors"):
        assert (other / file).stat().st_size == (copy / file).stat().st_size
        kept = (copy / file).read_bytes()
        shutil.copy(other / file, copy / file)
        with pytest.raises(
            ValueError, match=rf"{file}' is damaged: (block 0 of '.*', which begins|the checksums of '.*', wh)"
        ):
            load(copy)
        (copy / file).write_bytes(kept)
    shutil.copy(other / MANIFEST, copy / MANIFEST)
    with pytest.raises(ValueError, match="is damaged"):
        load(copy)


def test_files_that_are_links_are_not_followed(copy: Path, tmp_path: Path) -> None:
    (copy / RANK_FILE).rename(tmp_path / "elsewhere")
    (copy / RANK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is no regular file"):
        load(copy)


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
