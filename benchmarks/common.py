"""Shared by the benchmarks: a module, ranks as processes, interleaved timing, facts about the machine."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """The module of Lightning's tensor-parallel documentation: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def machine_facts() -> dict[str, Any]:
    """Return the facts that figures depend on: processor, cores, load, versions, date."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def cuda_facts() -> dict[str, Any]:
    """Return facts about CUDA device 0, from nvidia-smi, because this process must not use CUDA before it forks.

    Without nvidia-smi, as in a container that has only the driver's libraries, the name is "unknown".
    """
    name, driver = "unknown", "unknown"
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return {"gpu": name, "driver": driver, "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 600.0, backend: str = "gloo"
) -> Any:
    """Call `function(*args)` on `num_ranks` fresh processes of one group, each with one thread.

    With the backend "fake" only rank 0 runs; torch's fake process group simulates the other ranks.

    Args:
        function: its result on rank 0 must fit JSON.
        num_ranks: the number of processes to start; their rendezvous is a file, so no port is used.
        args: arguments of the function; the processes are forked and inherit them.
        timeout_seconds: the limit for all ranks to finish; also the process group's timeout.
        backend: the group's backend.

    Returns:
        The result of `function` on rank 0.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; its traceback is in the text.
        torch.multiprocessing.ProcessExitedException: a rank ended without an exception, such as by a signal.
        TimeoutError: a rank had not finished after `timeout_seconds`; all are killed.
    """
    with tempfile.TemporaryDirectory(prefix="weft-benchmark-") as folder:
        gc.freeze()  # so that the ranks' garbage collectors do not copy pages that the ranks share with this process
        ranks = mp.start_processes(
            _rank_main,
            (num_ranks, Path(folder), timeout_seconds, backend, (function, args)),
            1 if backend == "fake" else num_ranks,
            join=False,
            start_method="fork",  # ranks inherit the imported torch; this process has started nothing else
        )
        gc.unfreeze()
        deadline = time.monotonic() + timeout_seconds
        try:
            while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{function.__name__} took more than {timeout_seconds:.0f} s on {num_ranks} ranks; "
                        "give it more time, or run it on a quieter machine."
                    )
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return json.loads(Path(folder, "result.json").read_text())


def _rank_main(
    rank: int, num_ranks: int, folder: Path, timeout_seconds: float, backend: str, job: tuple[Callable[..., Any], Any]
) -> None:
    function, args = job
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=_store(backend, folder, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    result = function(*args)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _store(backend: str, folder: Path, num_ranks: int) -> dist.Store:
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore()
    return dist.FileStore(str(folder / "store"), num_ranks)


def interleaved_seconds(
    candidates: Mapping[str, Callable[[], None]],
    *,
    num_samples: int,
    calls_per_sample: int | Mapping[str, int],
    warm_up: int = 5,
    barrier: Callable[[], object] = dist.barrier,
) -> dict[str, list[float]]:
    """Return seconds per call of each candidate, sampled in turn, so that machine noise affects all equally.

    Collective over the default group. A sample starts after `barrier`, which should release all ranks at almost the
    same time. A sample has `calls_per_sample` calls (a number for all candidates, or one for each), and its time is
    that of the slowest rank. Every second sample runs the candidates in reverse order.
    """
    for function in candidates.values():
        for _ in range(warm_up):
            function()
    order = list(candidates)
    local_seconds = {name: torch.zeros(num_samples, dtype=torch.float64) for name in order}
    for sample in range(num_samples):
        for name in order if sample % 2 == 0 else order[::-1]:
            function = candidates[name]
            num_calls = calls_per_sample if isinstance(calls_per_sample, int) else calls_per_sample[name]
            barrier()
            start = time.perf_counter()
            for _ in range(num_calls):
                function()
            local_seconds[name][sample] = (time.perf_counter() - start) / num_calls
    for times in local_seconds.values():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return {name: times.tolist() for name, times in local_seconds.items()}


def median_paired_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median over the samples of numerator / denominator, whose times are measured one after the other."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))
