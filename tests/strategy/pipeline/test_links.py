"""Stages with device-to-device links: which ranks are linked, and parity with one device."""

from __future__ import annotations

import copy

import pytest
import torch
from strategy.pipeline.test_pipeline_parity import next_token, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft import pipeline_links
from weft.collectives import BackendOptions
from weft.strategy._plan import default_stages_per_rank
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
def test_peers_of_stages(rank: int, rank_of: list[int], tied: list[set[int]], expected: list[int]) -> None:
    assert peers_of(rank, rank_of, tied) == expected


@on_ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_steps_over_links_match_one_device(rank: int, world_size: int, schedule: str) -> None:
    """The output layer is tied to the embedding, so their ranks, if they are two, also send to each other."""
    num_stages = world_size * default_stages_per_rank(schedule)
    cuts = [f"layers.{i}" for i in range(1, num_stages)] if num_stages > 2 else ["layers.2"]
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(n_layers=8 if len(cuts) == 7 else 4, tie_head=True, dtype=torch.float64))
    model, batch = copy.deepcopy(reference), tokens()
    mesh = init_device_mesh("cpu", (world_size,))
    peers = [peer for peer in range(world_size) if peer != rank]
    pipeline_links.link(mesh.get_group(), peers, torch.device("cpu"), transport=BackendOptions().transport)
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


@pytest.mark.parametrize(
    ("wanted", "device", "linked"),
    [(None, "cuda:1", []), ("never", "cuda:1", []), ("always", "cpu", []), ("always", "cuda:1", [([1, 3], "cuda:1")])],
)
def test_environment_enables_links(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, device: str, linked: list[object]
) -> None:
    links: list[object] = []
    monkeypatch.setattr(
        pipeline_links, "link", lambda group, peers, device_to_link: links.append((peers, str(device_to_link)))
    )
    monkeypatch.delenv("WEFT_PIPELINE_LINKS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("WEFT_PIPELINE_LINKS", wanted)
    link_stages(None, [1, 3], torch.device(device))  # type: ignore[arg-type]
    assert links == linked


def test_invalid_environment_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PIPELINE_LINKS", "nccl")
    with pytest.raises(ValueError, match="got WEFT_PIPELINE_LINKS=nccl; set it to always or never"):
        link_stages(None, [1], torch.device("cuda:0"))  # type: ignore[arg-type]
