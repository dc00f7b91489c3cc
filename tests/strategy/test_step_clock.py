"""The times of dry runs: the clock of a step, and the seconds of an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.strategy._plan import Cluster
from weft.strategy.dry_run.host_seconds import MAPPED_BYTES, seconds_per_mapped_byte, seconds_per_sharded_collective
from weft.strategy.dry_run.operator_seconds import MeasuredSeconds, RooflineSeconds
from weft.strategy.dry_run.step_clock import StepClock
from weft.strategy.tuning import read_cluster

# -- the clock -----------------------------------------------------------------------------------------------


class Seconds:
    """Each call takes as many seconds as its first argument says, and a new byte one."""

    sharded_collective = 0.0

    def first_write(self, num_bytes: int) -> float:
        return float(num_bytes)

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        return float(args[0])


def _clock(overlaps: bool, num_ranks: int = 4, sharded: bool = True, **rates: Any) -> StepClock:
    """Return a clock with tensor-parallel groups of two, links of 1 byte per second, and no other costs."""
    link = {"seconds_per_message": 0.0, "bytes_per_second": 1.0}
    cluster = read_cluster({"like": "h100", "seconds_per_kernel": 0, "overlaps": overlaps, "host_link": link, **rates})
    return StepClock(cluster, Seconds(), num_ranks, 2, has_sharded_parameters=sharded)


def _compute(clock: StepClock, seconds: float, phase: str = "forward") -> None:
    clock.operator(torch.ops.aten.relu.default, (seconds,), {}, None, phase)


DATA, TENSOR = [0, 2], [2, 3]


def test_clock_adds_up_calls() -> None:
    clock = _clock(overlaps=False)
    _compute(clock, 3)
    clock.collective("allreduce_", 8, TENSOR)  # two ranks send half of the bytes twice
    clock.collective("_allgather_base_", 8, DATA)
    clock.collective("_reduce_scatter_base_", 6, DATA)
    clock.collective("barrier", 0, DATA)
    _compute(clock, 5, "step")
    times = clock.end_step()
    assert times.seconds == {"compute": 3, "tensor_parallel": 8, "data_parallel": 4 + 3, "optimizer": 5}
    assert (times.sent_bytes, times.num_operators) == (8 + 4 + 3, 2)
    clock.begin_step()
    assert sum(clock.end_step().seconds.values()) == 0


def test_clock_adds_what_processors_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores for four ranks: code takes twice as long, also that of FSDP2 for its collectives."""
    monkeypatch.setattr(Seconds, "sharded_collective", 10.0)
    clock = _clock(overlaps=False, cores_per_host=2)
    clock.allocation(3, "forward")
    clock.allocation(2, "step")
    clock.collective("allreduce_", 8, DATA)
    clock.collective("_allgather_base_", 8, DATA)
    clock.collective("_reduce_scatter_base_", 6, DATA)
    seconds = clock.end_step().seconds
    assert seconds == {"compute": 6, "tensor_parallel": 0, "data_parallel": 8 + 4 + 3 + 2 * 2 * 10, "optimizer": 4}


def test_new_memory_costs_more_than_old() -> None:
    assert 0 < seconds_per_mapped_byte() < 1e-7
    assert 1e-5 < seconds_per_sharded_collective() < 1 and not torch.distributed.is_initialized()
    seconds = MeasuredSeconds(Cluster("cpu"))
    assert seconds.first_write(MAPPED_BYTES) > 0 == seconds.first_write(MAPPED_BYTES - 1)
    assert RooflineSeconds(Cluster("h100")).first_write(MAPPED_BYTES) == 0


def test_clock_overlaps_gathers_and_reductions() -> None:
    clock = _clock(overlaps=True)
    clock.collective("_allgather_base_", 20, DATA)  # 10 s, before anything can compute
    _compute(clock, 4)
    clock.collective("_allgather_base_", 14, DATA)  # 7 s from the end of the first gather: 3 s longer than the compute
    _compute(clock, 9, "backward")
    clock.collective("_reduce_scatter_base_", 4, DATA)  # 2 s beside the next compute
    _compute(clock, 5, "backward")
    clock.collective("_reduce_scatter_base_", 12, DATA)  # 6 s, for which the optimizer waits
    _compute(clock, 1, "step")
    assert clock.end_step().seconds == {
        "compute": 18,
        "tensor_parallel": 0,
        "data_parallel": 10 + 3 + 6,
        "optimizer": 1,
    }


def test_clock_gathers_one_unit_ahead() -> None:
    clock = _clock(overlaps=True)
    clock.collective("_allgather_base_", 4, DATA)  # 2 s
    _compute(clock, 10)
    clock.collective("_allgather_base_", 2, DATA)  # 1 s beside the compute; its parameters are used from 12 s on
    _compute(clock, 0.5)
    clock.collective("_allgather_base_", 2, DATA)  # 1 s from then, so that the device waits for half of it
    assert clock.end_step().seconds["data_parallel"] == 2 + 0.5


def test_clock_averages_replicas_of_several_hosts_beside_the_backward() -> None:
    network = {"seconds_per_message": 0.0, "bytes_per_second": 1.0}
    rates = {"devices_per_host": 2, "network_link": network, "host_link": {**network, "bytes_per_second": 4.0}}
    for cores, sharded, waiting in ((0, False, 10), (0, True, 8 + 8), (4, False, 2 + 2 + 8), (4, True, 2 * 10)):
        clock = _clock(overlaps=False, cores_per_host=cores, sharded=sharded, **rates)
        for _ in range(2):
            clock.collective("allreduce_", 8, DATA)  # 8 s on the network, and 2 s on a host
            _compute(clock, 3, "backward")
        _compute(clock, 1, "step")
        seconds = clock.end_step().seconds
        assert seconds == {"compute": 6, "tensor_parallel": 0, "data_parallel": waiting, "optimizer": 1}, cores
    clock = _clock(overlaps=False, cores_per_host=4, sharded=False, **rates)
    clock.collective("allreduce_", 8, TENSOR)
    assert clock.end_step().seconds["tensor_parallel"] == 2


def test_clock_repeats_batches() -> None:
    clock = _clock(overlaps=True)
    _compute(clock, 2)
    clock.collective("_reduce_scatter_base_", 6, DATA)
    clock.repeat(3)
    _compute(clock, 1)
    times = clock.end_step()
    assert times.seconds["compute"] == 7 and times.seconds["data_parallel"] == 9
    assert times.num_operators == 4 and times.sent_bytes == 9


def test_ranks_share_cores() -> None:
    clock = _clock(overlaps=False, cores_per_host=2)
    _compute(clock, 3)
    assert clock.end_step().seconds["compute"] == 6


# -- operators -----------------------------------------------------------------------------------------------


def test_roofline_takes_the_longer_time() -> None:
    mm = torch.ops.aten.mm.default
    a, b = torch.zeros(4, 8), torch.zeros(8, 2)
    result = torch.zeros(4, 2)
    cluster = Cluster("cpu")
    for flops, bandwidth, expected in ((1.0, 1e9, 2 * 4 * 8 * 2), (1e9, 1.0, 4 * (32 + 16 + 8))):
        cluster.float32_flops, cluster.bytes_per_second = flops, bandwidth
        assert RooflineSeconds(cluster).of(mm, (a, b), {}, result) == pytest.approx(expected)
    cluster.half_flops, cluster.bytes_per_second = 2.0, 1e9
    halves = tuple(each.bfloat16() for each in (a, b))
    assert RooflineSeconds(cluster).of(mm, halves, {}, result.bfloat16()) == pytest.approx(4 * 8 * 2)


def test_distinct_calls_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = MeasuredSeconds(Cluster("cpu"))
    calls: list[Any] = []
    original = MeasuredSeconds._measured

    def measured(self: MeasuredSeconds, func: Any, *rest: Any) -> float | None:
        calls.append(func)
        return original(self, func, *rest)

    monkeypatch.setattr(MeasuredSeconds, "_measured", measured)
    relu, index = torch.ops.aten.relu.default, torch.ops.aten.index_select.default
    first = seconds.of(relu, (torch.ones(100),), {}, torch.ones(100))
    assert first == seconds.of(relu, (torch.zeros(100),), {}, torch.zeros(100)) > 0
    assert seconds.of(relu, (torch.ones(101),), {}, torch.ones(101)) > 0
    assert len(calls) == 2
    # An invalid call has the time of the roofline.
    invalid = (torch.ones(4), 3, torch.zeros(2, dtype=torch.int64))
    assert seconds.of(index, invalid, {}, torch.ones(2)) == RooflineSeconds(Cluster("cpu")).of(
        index, invalid, {}, torch.ones(2)
    )
