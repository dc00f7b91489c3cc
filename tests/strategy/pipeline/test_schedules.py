"""Schedules from Python: golden files of every kind; values that print, parse, compare and pickle; errors."""

from __future__ import annotations

import csv
import pickle
import re
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from weft.strategy._plan import deal_samples, default_stages_per_rank, splits_backwards
from weft.strategy.pipeline import (
    SCHEDULES,
    Action,
    LinearTime,
    Schedule,
    Span,
    StageCost,
    StageProfile,
    partition,
    tune,
)

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_match_golden_files(kind):
    """4 ranks, 6 micro-batches. After an intended change, write `str(...)` of the schedules built here to the files."""
    schedule = Schedule.generate(kind, 4, 6, default_stages_per_rank(kind))
    lowered = schedule.merge_backwards().add_communication().add_unshards()
    assert str(schedule) == (GOLDEN / f"{kind}.csv").read_text()
    assert str(lowered) == (GOLDEN / f"{kind}.lowered.csv").read_text()
    lowered.check()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_torch_schedule_files_parse(kind, tmp_path):
    """The file is written action by action with torch.distributed.pipelining's class and csv, with idle cells."""
    ours = Schedule.generate(kind, 2, 3, default_stages_per_rank(kind))
    rows = [[torch_schedules._Action.from_str(str(action)) for action in actions] for actions in ours.ranks]
    path = tmp_path / "schedule.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[None, *row, None] for row in rows])
    assert Schedule.parse(path.read_text()) == ours


def test_schedules_round_trip():
    schedule = Schedule.generate("zero_bubble", 2, 3).add_communication()
    assert pickle.loads(pickle.dumps(schedule)) == schedule == Schedule.parse(str(schedule)) == eval(repr(schedule))
    assert hash(schedule) == hash(Schedule(schedule.ranks)) and schedule != Schedule.generate("gpipe", 2, 3)
    action = Action(2, "SEND_F", 5)
    assert (str(action), action.stage, action.kind, action.micro_batch) == ("2SEND_F5", 2, "SEND_F", 5)
    assert pickle.loads(pickle.dumps(action)) == action == eval(repr(action)) and len({action, Action(2, "F", 5)}) == 2
    assert Action(1, "UNSHARD").micro_batch is None and not Action(1, "UNSHARD").computes and Action(0, "W", 0).computes
    assert schedule.rank_of == [0, 1] and schedule.has_communication and schedule.has_backward
    assert Schedule.generate("1f1b", 2, 3).forward_only().num_micro_batches == 3


def test_simulation_gives_times_and_bytes():
    costs = [StageCost(forward=1, backward_input=1, backward_weight=1, transfer=0.5, activation_bytes=10)] * 2
    run = Schedule.generate("1f1b", 2, 4).simulate(costs)
    assert run.makespan == 17 and run.in_flight == [2, 1] and run.peak_bytes == [20, 10]
    assert run.ranks[0][0] == Span(Action(0, "F", 0), 0, 1) and run.ranks[1][0].start == 1.5
    assert run.bubble_fraction == pytest.approx(1 - 24 / 34)


def test_partition_and_tune_give_times_and_bytes():
    cut = partition([1, 1, 2], 2, activation_bytes=[4, 4, 4], parameter_bytes=[1, 1, 1], in_flight=[2, 1])
    assert (cut.begins, cut.times, cut.bytes) == ([0, 2], [2, 2], [18, 5])
    line = LinearTime.fit([1, 2], [3, 5])
    assert (line.fixed, line.per_sample, line.at(4)) == (1, 2, 9)
    stage = StageProfile(forward=line, backward_input=line, backward_weight=line, activation_bytes_per_sample=3)
    points = tune([stage] * 2, batch_size=8, num_ranks=2, kinds=["gpipe", "1f1b"], micro_batch_counts=[1, 2, 8])
    assert sorted(map(sum, (point.micro_batch_sizes for point in points))) == [8] * len(points)
    assert deal_samples(8, [1, 2, 1]) == [2, 4, 2]
    one = next(point for point in points if (point.kind, point.num_micro_batches) == ("gpipe", 1))
    assert repr(one).startswith("TunePoint(kind='gpipe', micro_batch_sizes=[8], makespan=102, bubble_fraction=0.5, ")
    assert points[0].makespan == min(point.makespan for point in points)
    assert {(point.kind, point.num_micro_batches) for point in points} == {
        (kind, count) for kind in ("gpipe", "1f1b") for count in (1, 2, 8)
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Schedule.parse("0F0\n1G0\n"), "schedule, line 2: cannot read the action '1G0'"),
        (lambda: Schedule.parse("0F0\n").simulate([]), "0 costs for 1 stages"),
        (lambda: deal_samples(1, [1, 1]), "2 micro-batches of a batch of 1"),
        (lambda: Schedule.parse("0F0,0B0,0B0\n").check(), "0B0 comes twice"),
        (lambda: Schedule.generate("1f2b", 2, 2), "unknown schedule '1f2b'"),
        (lambda: Schedule.generate("1f1b", 2, 2, 2), "has one stage on each rank and got 2"),
        (lambda: Schedule.generate("zbv", 2, 2), "schedule 'zbv' has two stages on each rank and got 1; cut the model"),
        (lambda: default_stages_per_rank("1f2b"), "unknown schedule '1f2b'"),
        (lambda: splits_backwards("1f2b"), "unknown schedule '1f2b'"),
        (lambda: Action(0, "UNSHARD", 1), "action UNSHARD takes no micro-batch"),
        (lambda: Action(0, "F"), "action F needs a micro-batch"),
        (lambda: Action(-1, "F", 0), "-1 is no stage or micro-batch"),
        (lambda: Action(0, "X", 0), "cannot read the action '0X0'"),
        (lambda: partition([1, 2], 1, activation_bytes=[1]), "1 activation_bytes for 2 layers"),
        (lambda: tune([], batch_size=1, num_ranks=1), "0 stages on 1 ranks"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
