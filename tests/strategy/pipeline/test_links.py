"""Stages whose messages go from device to device: which ranks are linked, and the numbers of one device."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from strategy.pipeline.test_pipeline_parity import next_token, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft import pipeline_links
from weft.strategy.pipeline import Pipeline
from weft.strategy.pipeline.links import link_stages, peers_of


@pytest.mark.parametrize(
    ("rank", "rank_of", "tied", "expected"),
    [
        (0, [0, 1, 2, 3], [], [1]),
        (2, [0, 1, 2, 3], [], [1, 3]),
        (0, [0, 1, 2, 3, 0, 1, 2, 3], [], [1, 3]),  # from the last rank back to the first
        (1, [0, 1, 1, 0], [], [0]),
        (3, [0, 1, 2, 3], [{0, 3}, {1, 2}], [0, 2]),
        (1, [0, 1, 2, 3], [{0, 3}], [0, 2]),
        (0, [0], [{0}], []),
    ],
)
def test_who_sends_to_whom(rank: int, rank_of: list[int], tied: list[set[int]], expected: list[int]) -> None:
    assert peers_of(rank, rank_of, tied) == expected


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.distributed_c10d.Backend:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@on_ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_steps_over_links_equal_one_device(rank: int, world_size: int, schedule: str) -> None:
    """With an output layer tied to the embedding, whose ranks send to each other, too."""
    cuts = [f"layers.{i}" for i in range(1, 4)] if schedule == "interleaved" or world_size == 4 else ["layers.2"]
    if schedule == "interleaved" and world_size == 4:
        cuts = [f"layers.{i}" for i in range(1, 8)]
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(n_layers=8 if len(cuts) == 7 else 4, tie_head=True, dtype=torch.float64))
    model, batch = copy.deepcopy(reference), tokens()
    mesh = init_device_mesh("cpu", (world_size,))
    peers = [peer for peer in range(world_size) if peer != rank]
    pipeline_links.link(mesh.get_group(), peers, torch.device("cpu"), transport=_gloo)
    pipeline = Pipeline(model, mesh, cuts, schedule=schedule, num_micro_batches=4)
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        next_token(reference, batch).backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            pipeline.step(batch, lambda micro_batch: next_token(model, micro_batch))
        assert any(event.name == "gloo:send" for event in profiler.events())
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12)
    pipeline_links.unlink(mesh.get_group())


@on_ranks(2)
def test_without_nccl_nothing_is_linked(rank: int) -> None:
    group = dist.new_group(backend="cpu:weft,cuda:gloo")
    for device in ("cpu", "cuda"):
        link_stages(group, [1 - rank], torch.device(device))
    assert not pipeline_links._backends.get(group.group_name)
