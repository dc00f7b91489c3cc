"""Pipeline stages on a CUDA device each, on the runtime without a device: links and the Trainer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_plugin.test_trainer_pipeline import assert_matches_one_device, run_all_loops
from ops.on_device import world_on
from torch import Tensor
from torch.utils import _pytree as pytree

import weft
from support import cuda_runtime
from support.ranks import on_ranks, run_on_ranks
from weft import pipeline_links

pytestmark = pytest.mark.cuda_runtime
BACKEND = "cpu:weft,cuda:nccl"
OPS = weft.ops
PATIENT_MS = 20_000  # so long that work begins only if the host or another stream needs it
PAUSE_SECONDS = 0.1


def _run_on_cuda(rank: int, world_size: int, links: str, **case: Any) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    os.environ["WEFT_PIPELINE_LINKS"] = links
    with world_on(BACKEND):
        result = run_all_loops(rank, world_size, **case, accelerator="cuda")
    return pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, result)


@pytest.mark.parametrize(
    ("world_size", "layout", "links"), [(2, "pp2", "never"), (2, "pp2", "always"), (4, "pp2,tp2", "never")]
)
def test_trainer_matches_one_device(tmp_path: Path, world_size: int, layout: str, links: str) -> None:
    options: dict[str, Any] = {"folder": str(tmp_path), "model_options": {}, "gradient_clip_val": 0.5}
    [expected] = run_on_ranks(1, run_all_loops, layout="auto", options={}, **options)
    for result in run_on_ranks(world_size, _run_on_cuda, links=links, layout=layout, options={}, **options):
        assert_matches_one_device(result, expected, has_all_data=True)


@on_ranks(2)
def test_received_memory_is_kept_until_it_has_been_used(rank: int) -> None:
    """A link allocates received memory on its own stream, but the current stream reads it."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend=BACKEND)
    pipeline_links.link(group, [1 - rank], torch.device("cuda", rank))
    name = group.group_name
    x = torch.ones(1 << 12, device="cuda")
    try:
        if rank == 0:
            for message in (x, x * 5):
                OPS.pipeline_wait(OPS.pipeline_send([message], 1, 0, name))
        else:
            [received] = OPS.pipeline_wait(OPS.pipeline_recv([x], 0, 0, name))
            torch.cuda.synchronize()
            with cuda_runtime.delay(PATIENT_MS):
                total = received.sum()
                time.sleep(PAUSE_SECONDS)  # until the current stream's thread waits for PATIENT_MS
            with cuda_runtime.delay(0):  # other streams run at once
                del received
                time.sleep(PAUSE_SECONDS)
                [received] = OPS.pipeline_wait(OPS.pipeline_recv([x], 0, 0, name))
                time.sleep(PAUSE_SECONDS)
            assert (total.item(), received.sum().item()) == (x.numel(), 5 * x.numel())
        OPS.pipeline_flush(name)
    finally:
        pipeline_links.unlink(group)
