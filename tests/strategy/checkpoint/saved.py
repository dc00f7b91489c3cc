"""A small checkpoint for tests of damaged and hostile files: how it is saved, loaded and edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.strategy.checkpoint import open_checkpoint, save
from weft.strategy.checkpoint.blocks import checksum
from weft.strategy.checkpoint.file_names import MANIFEST
from weft.strategy.checkpoint.manifest import _PREFIX

RANK_FILE = "rank-00000.safetensors"


class Config:
    """An object that JSON cannot carry."""


def state_of(value: float = 1.0) -> dict[str, Any]:
    """Return a state; `big` has several blocks in several panels."""
    generator = torch.Generator().manual_seed(int(value))
    big = torch.randn(256, 128, generator=generator)
    return {"model": {"big": big, "small": torch.full((3,), value)}, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}}


def save_to(folder: Path, value: float = 1.0) -> None:
    """Save a state with all kinds of files."""
    save(folder, state_of(value), {"score": torch.tensor(value + 1), "config": Config(), "epoch": 1}, {})


def load(folder: Path) -> None:
    """Load all of a checkpoint and compare; the objects are trusted, as only their file can be damaged."""
    checkpoint = open_checkpoint(folder, allow_pickle=True)
    state = state_of()
    target = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "optimizer": dict.fromkeys(state["optimizer"]),
    }
    checkpoint.load(target, alone=True)
    for name, value in state["model"].items():
        assert torch.equal(target["model"][name], value)
    assert target["optimizer"] == state["optimizer"]
    rest = checkpoint.rest()
    assert rest["score"] == 2.0 and rest["epoch"] == 1 and type(rest["config"]) is Config


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and write it with the right checksum."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    change(content)
    write(folder, json.dumps(content)[1:])


def write(folder: Path, text: str) -> None:
    """Write a manifest of a text after the first line, with its checksum."""
    (folder / MANIFEST).write_bytes(_PREFIX % checksum(text.encode()) + text.encode())
