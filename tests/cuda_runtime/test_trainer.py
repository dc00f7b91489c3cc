"""Compares the Trainer on CUDA devices over NCCL, on the runtime without a device, with the Trainer on one CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_plugin.scripts.meshes import assert_matches_one_device, fit
from ops.on_device import world_on

pytestmark = pytest.mark.cuda_runtime


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


def _fit_on_cuda(rank: int, world_size: int, **case: Any) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    with world_on("cpu:weft,cuda:nccl"):
        return fit(rank, world_size, **case, accelerator="cuda")


@pytest.mark.parametrize(
    ("layout", "stage", "optimizer"),
    [
        ("tp1", None, "SGD"),
        ("tp2", None, "SGD"),
        ("dp2", 0, "SGD"),
        ("dp2", 1, "SGD"),
        ("dp2", 2, "AdamW"),
        ("dp2", 3, "SGD"),
        ("dp2,tp2 by tokens", 3, "SGD"),
    ],
)
def test_every_axis_matches_one_cpu(folder: str, layout: str, stage: int | None, optimizer: str) -> None:
    assert_matches_one_device(folder, layout, stage, optimizer, 2, 0.3, _fit_on_cuda)
