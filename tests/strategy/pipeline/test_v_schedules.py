"""Schedules whose stages are placed in a V: rank r has the stages r and 2 * ranks - 1 - r, rank 0 the loss."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategy.pipeline.test_pipeline_parity import (
    CASES,
    V_SHAPED,
    assert_same_training,
    batch_of,
    build,
    chain,
    classify,
    features,
    loss_of,
    next_token,
    tokens,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline, Schedule

EIGHTHS = ["2", "4", "6", "8", "10", "12", "14"]  # of `chain`


def tied_llama() -> nn.Module:
    return Llama(LlamaArgs(n_layers=8, tie_head=True, dtype=torch.float64))


@on_ranks(2)
@pytest.mark.parametrize("kind", V_SHAPED)
@pytest.mark.parametrize("case", [case for case in CASES if 4 in CASES[case][1] and case != "chain"])
def test_unmodified_models_match_one_device(world_size: int, case: str, kind: str) -> None:
    """Values that skip stages cross the V, too: from one stage of a rank to the other, and back to a rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    make, cuts, _, _ = CASES[case]
    model, reference = build(make), build(make)
    pipeline = Pipeline(model, mesh, cuts[4], schedule=kind, num_micro_batches=3)
    assert_same_training(model, reference, pipeline, batch_of(case), loss_of(case))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", V_SHAPED)
def test_tied_weight_of_the_ends_is_on_one_rank(rank: int, world_size: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = build(tied_llama), build(tied_llama)
    cuts = [f"layers.{8 // world_size // 2 * stage}" for stage in range(1, 2 * world_size)]
    pipeline = Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=5)
    assert pipeline.stages == (rank, 2 * world_size - 1 - rank)
    assert pipeline.last_rank == 0 and pipeline.has_last_stage == (rank == 0)
    if rank == 0:
        assert model.output.weight is model.tok_embeddings.weight
    assert_same_training(model, reference, pipeline, tokens(), next_token)


@on_ranks(4)
@pytest.mark.parametrize("kind", V_SHAPED)
def test_uneven_micro_batches_match_one_device(world_size: int, kind: str) -> None:
    """Also batches with fewer samples than micro-batches, and a number of micro-batches that is set later."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = build(chain), build(chain)
    pipeline = Pipeline(model, mesh, EIGHTHS, schedule=kind, micro_batch_shares=[1, 2, 1, 3, 1])
    assert_same_training(model, reference, pipeline, features(), classify, num_steps=2)
    small = {name: value[:3] for name, value in features().items()}
    assert_same_training(model, reference, pipeline, small, classify, num_steps=2)
    pipeline.num_micro_batches = 7
    assert_same_training(model, reference, pipeline, features(), classify, num_steps=2)


@on_ranks(2)
@pytest.mark.parametrize("kind", V_SHAPED)
def test_evaluation_returns_results_on_rank_0(rank: int, world_size: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = build(chain), build(chain)
    pipeline = Pipeline(model, mesh, CASES["chain"][1][4], schedule=kind, num_micro_batches=3)
    results = pipeline.evaluate(features()["x"], model)
    assert len(results) == (3 if rank == 0 else 0)
    if rank == 0:
        torch.testing.assert_close(torch.cat(results), reference(features()["x"]), rtol=1e-12, atol=0)


@on_ranks(2)
def test_crossing_inside_of_a_rank_sends_nothing(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receives that a step posts are those of the other crossings, and the stages of rank 1 exchange nothing."""
    from weft.strategy.pipeline import runner

    mesh = init_device_mesh("cpu", (world_size,))
    model = build(chain)
    pipeline = Pipeline(model, mesh, CASES["chain"][1][4], schedule="zbv", num_micro_batches=4)
    channels: list[int] = []
    original = runner.ops.pipeline_send

    def pipeline_send(tensors: list[Tensor], peer: int, channel: int, group: str) -> Any:
        assert peer == 1 - rank
        channels.append(channel)
        return original(tensors, peer, channel, group)

    monkeypatch.setattr(runner.ops, "pipeline_send", pipeline_send)
    pipeline.step(features(), lambda batch: classify(model, batch))
    # Inputs of stage s have the channel 2s, and their gradients 2s + 1. Stage 2 follows stage 1 on rank 1.
    assert sorted(channels) == (sorted([2, 7] * 4) if rank == 0 else sorted([3, 6] * 4))


@on_ranks(2)
def test_wrong_numbers_of_stages_raise_on_every_rank(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for kind in V_SHAPED:
        for cuts, number in (["8"], 1), (["2", "4", "6", "8", "10"], 3):
            model = chain()
            message = f"schedule '{kind}' has two stages on each rank and got {number}; cut the model into two stages"
            with pytest.raises(ValueError, match=re.escape(message)):
                Pipeline(model, mesh, cuts, schedule=kind)
            assert len(list(model.parameters())) == len(list(chain().parameters()))  # nothing was removed
    dist.barrier()  # nothing was sent


@on_ranks(2)
@pytest.mark.parametrize("kind", V_SHAPED)
def test_automatic_cuts_make_two_stages_for_each_rank(rank: int, world_size: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = build(chain), build(chain)
    pipeline = Pipeline(model, mesh, "auto", schedule=kind)
    assert len(pipeline.cuts) == 3 and pipeline.num_micro_batches == 4
    assert_same_training(model, reference, pipeline, features(), classify, num_steps=2)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["zbv", "interleaved"])
def test_own_schedule_places_stages(rank: int, world_size: int, kind: str) -> None:
    """A generated schedule that is passed as a value has the same places as its name."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = build(chain), build(chain)
    schedule = Schedule.generate(kind, world_size, 4, 2)
    pipeline = Pipeline(model, mesh, CASES["chain"][1][4], schedule=schedule)
    assert pipeline.stages == tuple(stage for stage in range(4) if schedule.rank_of[stage] == rank)
    assert_same_training(model, reference, pipeline, features(), classify, num_steps=2)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["1f1b", "zbv", "v_half"])
def test_tied_weight_is_saved_once(rank: int, world_size: int, kind: str, tmp_path: Any) -> None:
    """A rank with both copies of the tied weight, or with the first, writes it."""
    from safetensors.torch import load_file

    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = build(tied_llama), build(tied_llama)
    stages = 2 if kind == "1f1b" else 4
    cuts = [f"layers.{8 // stages * stage}" for stage in range(1, stages)]
    Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=2)
    weft.save_pretrained(model, tmp_path / "saved")
    dist.barrier()
    values = {
        name: value
        for path in sorted((tmp_path / "saved").glob("*.safetensors"))
        for name, value in load_file(path).items()
    }
    expected = dict(reference.named_parameters())  # each tied weight once
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name
