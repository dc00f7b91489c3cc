"""The step of a pipeline from dry runs of its ranks, with whose times the schedule is simulated."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from weft.strategy._plan import Cluster, Schedule, Simulation, StageCost
from weft.strategy.dry_run.step_clock import StageTimes, StepTimes
from weft.strategy.dry_run.training import Prediction


def of_pipeline(predictions: Sequence[Prediction], cluster: Cluster, num_ranks: int) -> Prediction:
    """Return the prediction for the rank with the most bytes, with the times of the rank that ends last.

    The latter has the seconds in which it waits for other stages as "pipeline".

    Args:
        predictions: of one rank for each position in the pipeline, in order, with times.
        num_ranks: of all axes.
    """
    largest = max(predictions, key=lambda each: max(sum(usage.values()) for usage in each.phases.values()))
    return dataclasses.replace(largest, times=_times(predictions, cluster, num_ranks), digest=predictions[0].digest)


def _times(predictions: Sequence[Prediction], cluster: Cluster, num_ranks: int) -> StepTimes:
    times, stage_times = _all_times(predictions)
    num_of_stage = num_ranks // len(predictions)
    schedule = Schedule.parse(stage_times[0].schedule)
    simulation = schedule.simulate(_costs(schedule, stage_times, cluster, stride=num_of_stage))
    timeline = _Timeline(simulation, cluster, num_of_stage)

    def end_of(position: int) -> float:
        """Return when a rank ends, with what it does beside the computations of the schedule, as its optimizer."""
        beside = sum(times[position].seconds.values()) - sum(stage_times[position].seconds.values())
        return timeline.at(simulation.ranks[position][-1].end) + beside

    last = max(range(len(predictions)), key=end_of)
    computing = sum(timeline.at(span.end) - timeline.at(span.start) for span in simulation.ranks[last])
    share = computing / sum(stage_times[last].seconds.values())
    seconds = {
        kind: value * share if kind in ("compute", "tensor_parallel") else value
        for kind, value in times[last].seconds.items()
    }
    return StepTimes(
        {**seconds, "pipeline": max(0.0, end_of(last) - sum(seconds.values()))},
        statistics.fmean(each.flops for each in times),
        max(each.sent_bytes for each in times),
        max(each.num_operators for each in times),
    )


def _all_times(predictions: Sequence[Prediction]) -> tuple[list[StepTimes], list[StageTimes]]:
    times = [each.times for each in predictions if each.times is not None]
    stage_times = [each.stage_times for each in predictions if each.stage_times is not None]
    assert len(times) == len(stage_times) == len(predictions)
    return times, stage_times


def _costs(schedule: Schedule, stage_times: Sequence[StageTimes], cluster: Cluster, stride: int) -> list[StageCost]:
    """Return the costs of each stage and micro-batch.

    A message to another rank takes as long as an all-gather of two ranks that sends as many bytes.

    Args:
        stride: the distance of ranks with consecutive stages.
    """
    seconds = {action: value for each in stage_times for action, value in each.seconds.items()}
    sent: dict[int, int] = {}  # by channel
    for each in stage_times:
        sent |= each.message_bytes
    number = schedule.num_micro_batches

    def transfer(stage: int) -> float:
        num_bytes = max(sent.get(2 * stage + 2, 0), sent.get(2 * stage + 3, 0)) / number
        return cluster.all_gather_seconds(2 * num_bytes, 2, stride) if num_bytes else 0.0

    def cost(stage: int, i: int) -> StageCost:
        return StageCost(
            forward=seconds[f"{stage}F{i}"],
            backward_input=seconds.get(f"{stage}B{i}", 0.0) + seconds.get(f"{stage}I{i}", 0.0),
            backward_weight=seconds.get(f"{stage}W{i}", 0.0),
            transfer=transfer(stage),
        )

    return [cost(stage, i) for stage in range(schedule.num_stages) for i in range(number)]


class _Timeline:
    """Maps a time of a simulation to a time in which the ranks that compute share the cores of their hosts.

    The simulated computations take as long as while all ranks compute. Where some of them wait, the others are faster,
    so each interval between two events of the simulation shrinks by the ratio of the slowdowns.
    """

    def __init__(self, simulation: Simulation, cluster: Cluster, num_of_stage: int) -> None:
        full = cluster.slowdown(len(simulation.ranks) * num_of_stage)
        spans = [span for rank in simulation.ranks for span in rank]
        events = sorted({0.0, *(span.start for span in spans), *(span.end for span in spans)})
        changes = dict.fromkeys(events, 0)
        for span in spans:
            changes[span.start] += 1
            changes[span.end] -= 1
        self._times = {0.0: 0.0}
        num_computing, now = 0, 0.0
        for begin, end in itertools.pairwise(events):
            num_computing += changes[begin]
            slowdown = cluster.slowdown(num_computing * num_of_stage) if num_computing else full
            now += (end - begin) * slowdown / full
            self._times[end] = now

    def at(self, time: float) -> float:
        """Return the time of an event of the simulation."""
        return self._times[time]
