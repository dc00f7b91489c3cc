"""Measures the rates of CPU ranks of this host: operators alone and at once, and collectives of the backend weft."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.strategy.comparison.launch import launch
from weft.strategy.tuning.request import host_bytes

_TIMEOUT_SECONDS = 300.0
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 4 << 20  # of an all-reduce
_MATRIX_SIZE = 512
_COPIED_BYTES = 32 << 20
_PRODUCTS_BETWEEN = 4  # between two all-reduces, some milliseconds
_SAMPLES = 7
_SAMPLE_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class HostProfile:
    """The rates of this host; their names are those of `Cluster`.

    Attributes:
        device_bytes: an equal share of the host's memory for each rank.
        host_link: seconds of a message and bytes per second, with which a ring would take the measured times of
            all-reduces among ranks that do nothing else; (0, 0): there was one rank.
        seconds_per_wait: how much longer an all-reduce takes among ranks that compute in between, and that do not
            arrive at once, above all if they share cores.
    """

    float32_flops: float
    half_flops: float
    bytes_per_second: float
    seconds_per_kernel: float
    cores_per_host: float
    device_bytes: int
    host_link: tuple[float, float]
    seconds_per_wait: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a file for `weft tune --cluster`."""
        rates: dict[str, Any] = {"like": "cpu"}
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        rates |= {name: float(f"{value:.4g}") for name, value in numbers.items()}
        rates["device_bytes"] = self.device_bytes
        if self.host_link[1]:
            values = dict(zip(("seconds_per_message", "bytes_per_second"), self.host_link, strict=True))
            rates["host_link"] = {name: float(f"{value:.4g}") for name, value in values.items()}
        return rates

    def __str__(self) -> str:
        """Return YAML."""
        return "\n".join(f"{name}: {_yaml(value)}" for name, value in self.to_dict().items())


def profile_host(num_ranks: int) -> HostProfile:
    """Return the rates of `num_ranks` CPU ranks of this host, with one thread each.

    Takes some seconds, in which the host should do nothing else. A script must call this function under
    `if __name__ == "__main__"`.

    Raises:
        ValueError: `num_ranks` is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"profile: got {num_ranks} ranks; give a number from 1.")
    alone: dict[str, float] = launch(_measure_operators, None, 1, _TIMEOUT_SECONDS)
    if num_ranks == 1:
        return HostProfile(**alone, cores_per_host=1.0, device_bytes=host_bytes(), host_link=(0.0, 0.0))
    together: dict[str, float] = launch(_measure_together, None, num_ranks, _TIMEOUT_SECONDS)
    messages = 2 * (num_ranks - 1)
    transfer = max((together["large_seconds"] - together["small_seconds"]) / messages, 1e-9)
    link = (together["small_seconds"] / messages, _LARGE_BYTES / num_ranks / transfer)
    return HostProfile(
        **alone,
        cores_per_host=num_ranks / together["slowdown"],
        device_bytes=host_bytes() // num_ranks,
        host_link=link,
        seconds_per_wait=max(0.0, together["skewed_seconds"] - together["small_seconds"]),
    )


def _measure_operators(_: None) -> dict[str, float]:
    torch.set_num_threads(1)
    return {
        "float32_flops": _product_rate(torch.float32),
        "half_flops": _product_rate(torch.bfloat16),
        "bytes_per_second": _copy_rate(),
        "seconds_per_kernel": _seconds_per_operator(),
    }


def _measure_together(_: None) -> dict[str, float]:
    """Return the times of all-reduces, and how much longer a product takes when all ranks compute one."""
    torch.set_num_threads(1)
    found = {"slowdown": max(1.0, statistics.median(_slowdown() for _ in range(_SAMPLES)))}
    for name, num_bytes in (("small_seconds", _SMALL_BYTES), ("large_seconds", _LARGE_BYTES)):
        values = torch.zeros(num_bytes // 4)
        found[name] = _seconds_of(lambda values=values: dist.all_reduce(values))  # type: ignore[misc]
    found["skewed_seconds"] = _skewed_seconds()
    return found


def _skewed_seconds() -> float:
    """Return the time of a small all-reduce among computing ranks, most of which is a wait for the last rank."""
    a, b = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE) for _ in range(2))
    values = torch.zeros(_SMALL_BYTES // 4)

    def compute() -> None:
        for _ in range(_PRODUCTS_BETWEEN):
            torch.mm(a, b)

    def compute_and_reduce() -> None:
        compute()
        dist.all_reduce(values)

    differences = [_seconds_of(compute_and_reduce, 0.2, 1) - _seconds_of(compute, 0.2, 1) for _ in range(_SAMPLES)]
    return statistics.median(differences)


def _slowdown() -> float:
    """Return the ratio of two times of rank 0, measured one after the other: among computing ranks, and alone."""
    a, b = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE) for _ in range(2))

    def seconds() -> float:
        start, num_calls = time.perf_counter(), 0
        while time.perf_counter() < start + _SAMPLE_SECONDS:
            torch.mm(a, b)
            num_calls += 1
        return (time.perf_counter() - start) / num_calls

    dist.barrier()
    together = seconds()
    dist.barrier()
    if dist.get_rank() == 0:
        alone = seconds()
    else:
        time.sleep(_SAMPLE_SECONDS)
        alone = together
    return together / alone


def _product_rate(dtype: torch.dtype) -> float:
    a, b = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE).to(dtype) for _ in range(2))
    return 2 * _MATRIX_SIZE**3 / _seconds_of(lambda: torch.mm(a, b))


def _copy_rate() -> float:
    source = torch.zeros(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _seconds_of(lambda: target.copy_(source))


class _Counting(TorchDispatchMode):
    """Counts operators that are not views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def _seconds_per_operator() -> float:
    """Return what an operator of a training step takes beyond its kernel: autograd, modules and Python.

    A step of small layers takes almost only that, and the time of small kernels, which is that of calling one.
    """
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)])
    x = torch.randn(4, 8)

    def step() -> None:
        F.mse_loss(model(x), x).backward()

    step()
    counting = _Counting()
    with counting:
        step()
    a = torch.randn(8, 8)
    with torch.no_grad():
        kernel = _seconds_of(lambda: torch.mm(a, a))
    return max(0.0, _seconds_of(step) / counting.number - kernel)


def _seconds_of(function: Callable[[], object], least_seconds: float = 0.05, num_samples: int = _SAMPLES) -> float:
    """Return the median over samples of the seconds of a call; a sample has as many calls as fill `least_seconds`."""
    function()
    start = time.perf_counter()
    function()
    num_calls = max(1, min(10_000, round(least_seconds / max(time.perf_counter() - start, 1e-7))))
    if dist.is_initialized():  # as many calls on each rank
        number = torch.tensor(num_calls)
        dist.broadcast(number, 0)
        num_calls = int(number)
    samples = []
    for _ in range(num_samples):
        start = time.perf_counter()
        for _ in range(num_calls):
            function()
        samples.append((time.perf_counter() - start) / num_calls)
    return statistics.median(samples)


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(each)}" for name, each in value.items()) + "}"
    return f"{value:.3e}" if isinstance(value, float) else str(value)
