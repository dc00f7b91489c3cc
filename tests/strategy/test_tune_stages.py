"""Pipelines in the search of a module: the step is simulated with the times of the stages' computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from weft.strategy._plan import Cluster, Schedule
from weft.strategy.dry_run.process import DryRunProcess
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.step_clock import StageTimes, StepTimes
from weft.strategy.dry_run.training import Prediction
from weft.strategy.tuning import read_cluster, tune_module
from weft.strategy.tuning.result import Tuning
from weft.strategy.tuning.stages import of_pipeline

RATES = {"like": "h100", "devices_per_host": 2}
MICRO_BATCHES, FORWARD, BACKWARD, OPTIMIZER, REDUCTION = 4, 1.0, 2.0, 0.5, 0.25
NUM_RANKS, MESSAGE_BYTES = 2, 1000


def _prediction(stage: int, peak: int, slowdown: float = 1.0) -> Prediction:
    """Return the prediction for a rank with one stage, all of whose computations take `slowdown` times as long."""
    schedule = str(Schedule.generate("1f1b", NUM_RANKS, MICRO_BATCHES, 1))
    seconds = {f"{stage}F{i}": FORWARD * slowdown for i in range(MICRO_BATCHES)}
    seconds |= {f"{stage}B{i}": BACKWARD * slowdown for i in range(MICRO_BATCHES)}
    busy = {
        "compute": 0.75 * sum(seconds.values()),
        "tensor_parallel": 0.25 * sum(seconds.values()),
        "data_parallel": REDUCTION,
        "optimizer": OPTIMIZER,
    }
    messages = {2: MICRO_BATCHES * MESSAGE_BYTES} if stage == 0 else {3: MICRO_BATCHES * MESSAGE_BYTES}
    return Prediction(
        1,
        stage,
        (stage,),
        ("1",),
        {"backward": {"scratch": peak}},
        (),
        4,
        times=StepTimes(busy, 8.0 - 2 * stage, MICRO_BATCHES * MESSAGE_BYTES, 10),
        stage_times=StageTimes(schedule, seconds, messages),
    )


def _cluster(**rates: Any) -> Cluster:
    links = {name: {"seconds_per_message": 0.0, "bytes_per_second": 1e30} for name in ("host_link", "network_link")}
    return read_cluster({"like": "cpu", "cores_per_host": 0, "devices_per_host": 2, **links, **rates})


def test_ranks_wait_for_other_stages() -> None:
    found = of_pipeline([_prediction(0, 10), _prediction(1, 20)], _cluster(), NUM_RANKS)
    assert found.rank == 1 and found.times is not None  # the rank with the most bytes
    busy = MICRO_BATCHES * (FORWARD + BACKWARD)
    bubble = (NUM_RANKS - 1) * (FORWARD + BACKWARD)
    assert found.times.seconds == {
        "compute": pytest.approx(0.75 * busy),
        "tensor_parallel": pytest.approx(0.25 * busy),
        "data_parallel": REDUCTION,
        "optimizer": OPTIMIZER,
        "pipeline": pytest.approx(bubble),
    }
    assert (found.times.flops, found.times.sent_bytes) == (7.0, MICRO_BATCHES * MESSAGE_BYTES)


def test_messages_take_the_time_of_the_link() -> None:
    """The first forward reaches the second stage later, and the last gradient the first stage."""
    link = {"seconds_per_message": 0.5, "bytes_per_second": MESSAGE_BYTES / 0.25}
    found = of_pipeline([_prediction(0, 1), _prediction(1, 1)], _cluster(host_link=link), NUM_RANKS)
    assert found.times is not None
    assert found.times.seconds["pipeline"] >= (NUM_RANKS - 1) * (FORWARD + BACKWARD) + 2 * 0.75


def test_waiting_ranks_leave_their_cores_to_others() -> None:
    """On one core, computations of two ranks take twice as long as alone, and a step as long as all of them alone."""
    predictions = [_prediction(stage, 1, slowdown=2.0) for stage in range(NUM_RANKS)]
    found = of_pipeline(predictions, _cluster(cores_per_host=1), NUM_RANKS)
    assert found.times is not None
    total = NUM_RANKS * MICRO_BATCHES * (FORWARD + BACKWARD)
    assert sum(found.times.seconds.values()) == pytest.approx(total + REDUCTION + OPTIMIZER)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(4)))


def rows() -> Tensor:
    return torch.zeros(8, 64)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


OPTIONS: dict[str, Any] = {"batch": rows, "loss_fn": loss, "cluster": RATES}


def _search(devices: int, fixed: str, **options: Any) -> Tuning:
    return tune_module(Chain, devices, fixed=fixed, **OPTIONS, **options)


def test_dry_runs_time_each_computation_of_a_stage() -> None:
    """Stages of as many layers take as long, and the sum of all times is that of the step without a pipeline."""
    with DryRunProcess() as process:
        cluster = _cluster(like="h100", seconds_per_kernel=0)
        request = Request(Chain, "pp2", batch=rows, loss_fn=loss, num_micro_batches=2, pipeline_cuts=["2"])
        first, second = process.run(request, cluster)
        accumulating = Request(Chain, "tp1", batch=rows, loss_fn=loss, num_rows=4, accumulate_grad_batches=2)
        [full] = process.run(accumulating, cluster)
    assert first.stage_times is not None and second.stage_times is not None and full.times is not None
    assert set(first.stage_times.seconds) == {"0F0", "0F1", "0B0", "0B1"}
    assert set(second.stage_times.seconds) == {"1F0", "1F1", "1B0", "1B1"}
    for times, channel in ((first.stage_times, 2), (second.stage_times, 3)):
        header_bytes = times.message_bytes.pop(channel) - 8 * 64 * 4
        assert 0 <= header_bytes <= 2 * 64 and not times.message_bytes
    both = sum(first.stage_times.seconds.values()) + sum(second.stage_times.seconds.values())
    assert both == pytest.approx(full.times.seconds["compute"], rel=0.1)


def test_search_divides_modules() -> None:
    found = _search(2, "pp=2", activation_checkpointing="none")
    [layout] = found.layouts
    assert (layout.layout, layout.pipeline_cuts, layout.pipeline_schedule) == ("pp2", ("2",), "1f1b")
    assert layout.num_micro_batches in (2, 4, 8, 16) and layout.sequences == 16
    assert layout.seconds["pipeline"] > 0
    text = str(found)
    assert f"{layout.num_micro_batches} x 1f1b, waits" in text
    options = yaml.safe_load(text[text.index("trainer:") :])["trainer"]["strategy"]["init_args"]
    assert options == {
        "plan": "auto",
        "layout": "pp2",
        "pipeline_cuts": ["2"],
        "num_micro_batches": layout.num_micro_batches,
    }


def test_batches_with_fewer_rows_than_micro_batches() -> None:
    found = tune_module(Chain, 2, fixed="pp=2", keeps_batch=True, **{**OPTIONS, "batch": torch.zeros(3, 64)})
    assert found.layouts[0].sequences == 3


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_options_of_pipelines_are_kept(schedule: str) -> None:
    kept = {"pipeline_cuts": ["1", "2", "3"], "pipeline_schedule": schedule, "num_micro_batches": 3}
    layouts = {each.layout: each for each in _search(2, "rep=1,dp=1", **kept).layouts}
    assert layouts["pp2"].strategy_options == {"layout": "pp2", **kept}
    assert layouts["tp2"].strategy_options == {"layout": "tp2"}


def test_pipelines_without_enough_layers_are_named() -> None:
    found = _search(8, "rep=1,dp=1", zero_stage=3)
    assert {"pp8"} == {name for name, _ in found.rejections if name.startswith("pp")}
    assert "pp4,tp2" in {each.layout for each in found.layouts} | {name for name, _ in found.rejections}
