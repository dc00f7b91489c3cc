"""The mixin of Report, a callback that writes an HTML report of a run; `factory.py` adds the base class."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import collectives, flight, memory
from weft._plugin.console import Console
from weft._plugin.data_axes import DATA_AXIS, REPLICATE_AXIS
from weft._plugin.health_monitor import measures_waiting
from weft._plugin.meshes import CONTEXT_AXIS, EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, axis_sizes
from weft._plugin.monitors import check_at_least_one, num_steps
from weft._plugin.run_curves import Curves
from weft._plugin.step_times import StepTimer
from weft._plugin.strategy_mixin import StrategyMixin
from weft._plugin.throughput_monitor import first_dim, num_data_ranks

_MOST_CALLS = 512  # that `weft.flight.calls` returns
# Names of the axes in a layout, such as "pp2,tp2".
_SHORT = {
    **{PIPELINE_AXIS: "pp", REPLICATE_AXIS: "rep", DATA_AXIS: "dp", CONTEXT_AXIS: "cp", TENSOR_AXIS: "tp"},
    EXPERT_AXIS: "ep",
}


class ReportMixin:
    """Writes a report of the run to a directory: `weft_report.html`, which needs no other file, and its data as JSON.

    The report shows the mesh, the sharding of each parameter, the peak memory of each rank by category and the memory
    of one rank during a step, planned and measured pipeline timelines, the time and the communication of a step, and
    the scalar values that the run logs, such as those of `ThroughputMonitor`. It is written when training ends. If an
    exception ends training on rank 0, rank 0 writes what it knows: the curves.

    "mean loss" is that of rank 0's batches since the last point. At each point, the ranks of a pipeline exchange one
    trace; at the end, all ranks send their data to rank 0. On CPUs, the run starts the counting of `weft.memory`, as
    with `MemoryMonitor`. A file that cannot be written is a warning; a directory that cannot be created, an error.

    Args:
        dirpath: the directory; None: the Trainer's `log_dir`, or `default_root_dir` without a logger.
        every_n_steps: the optimizer steps between two points of a curve; twice as many for each 1,000 points. The
            first and the last step have a point, too.
        predicted_bytes: the predicted memory of a rank, for example by `weft estimate`, drawn beside the peaks; None:
            the prediction of layout="auto", if that chose the layout.
    """

    _clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        every_n_steps: int = 10,
        predicted_bytes: int | None = None,
    ) -> None:
        super().__init__()
        check_at_least_one("Report", "every_n_steps", every_n_steps)
        is_count = isinstance(predicted_bytes, int) and not isinstance(predicted_bytes, bool) and predicted_bytes > 0
        if predicted_bytes is not None and not is_count:
            raise ValueError(f"Report got predicted_bytes={predicted_bytes!r}; pass a number of bytes from 1 on.")
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._every_n_steps = every_n_steps
        self._predicted_bytes = predicted_bytes
        self._restart(keeps_points=False)

    def _restart(self, keeps_points: bool) -> None:
        self._directory: Path | None = None  # None: there is no training to report
        self._curves = Curves(self._every_n_steps, keeps_points)
        self._step = self._point_step = 0
        self._point_time = self._paused_at = 0.0
        self._samples = 0
        self._phases: list[tuple[str, dict[str, int]]] = []
        self._timer: StepTimer | None = None  # None: before the end of the first step
        self._timed_from = 0
        self._window = _StepWindow()
        self._communication: dict[str, Any] = {"axes": {}, "is_truncated": False}
        self._pipeline: dict[str, Any] | None = None
        self._held_by_action: list[tuple[str, dict[str, int]]] = []  # in a pipeline: after each computation
        self._uncounted_bytes = 0

    # ---- hooks of Lightning ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._directory = None
        self._module_name = type(pl_module).__name__  # weft may change the class
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, StrategyMixin):
            name = type(trainer.strategy).__name__
            raise TypeError(f"Report got a Trainer with a {name}; pass strategy='weft'.")
        if trainer.strategy.root_device.type != "cuda":
            memory.track(known=(*pl_module.parameters(), *pl_module.buffers()))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from weft.strategy.agreement import on_all_ranks

        self._restart(keeps_points=trainer.is_global_zero)
        directory = self._dirpath or Path(trainer.log_dir or trainer.default_root_dir)

        def create() -> None:
            if trainer.is_global_zero:
                directory.mkdir(parents=True, exist_ok=True)

        on_all_ranks(f"create the directory {str(directory)!r} of Report", create)
        self._directory = directory
        self._step = self._point_step = self._timed_from = num_steps(trainer, pl_module)
        self._point_time = self._now(trainer)
        if memory.is_tracking():
            self._uncounted_bytes = memory.tag_parameters(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._window = _StepWindow()  # a LightningModule may have skipped the rest of the last epoch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._window.batch_begins()
        self._phases = []
        self._note(trainer, "step begins")
        if self._timer is not None:
            self._timer.batch_begins()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._note(trainer, "backward begins")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._note(trainer, "optimizer steps")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch, and add the point of a step; collective in a pipeline, whose ranks exchange traces."""
        if self._timer is not None:
            self._timer.batch_ends()
        self._note(trainer, "step ends")
        self._samples += _num_samples(batch)
        # Lightning divides the loss that callbacks see by the number of accumulated batches.
        factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._curves.add_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs, factor)
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._step == before:
            return
        window, self._window = self._window, _StepWindow()
        is_first = self._timer is None
        if self._timer is None:
            self._timer, self._timed_from = StepTimer(self._clock, collectives.seconds_waited), self._step
        if is_first or self._step % self._curves.interval == 0:
            now = self._now(trainer)
            self._timer.pause()
            self._exchange_traces(trainer)
            self._communication = window.communication(trainer.strategy)
            self._add_point(trainer, now)
            self._curves.add_logged(self._step, trainer.callback_metrics)
            self._timer.resume()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._curves.add_logged(self._step, trainer.callback_metrics)  # on all ranks: reading may reduce values

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._timer is not None:
            self._timer.pause()
        self._window.pause()
        self._paused_at = self._now(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._window.resume()
        self._point_time += self._now(trainer) - self._paused_at
        if self._timer is not None:
            self._timer.resume()
        if self._directory is not None:  # not before training, for the sanity check or `validate`
            self._curves.add_logged(self._step, trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Gather the ranks' data, and write the report on the first rank; collective."""
        if self._step > self._point_step:
            self._add_point(trainer, self._now(trainer))
        self._curves.add_logged(self._step, trainer.callback_metrics)
        local = self._local_data(trainer, pl_module)
        gathered: list[Any] | None = [local]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [None] * dist.get_world_size() if trainer.is_global_zero else None
            dist.gather_object(local, gathered, dst=0)
        self._write(trainer, "Training ended.", gathered or [])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        status = f"Training failed after step {self._step}: {type(exception).__name__}: {exception}"
        self._write(trainer, status, [])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._directory = None

    # ---- data ----------------------------------------------------------------------------------------------------

    def _now(self, trainer: Any) -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._clock()

    def _note(self, trainer: Any, phase: str) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            self._phases.append((phase, {"allocated": torch.cuda.memory_allocated(device)}))
        elif memory.is_tracking():
            held = memory.by_category()
            self._phases.append((phase, {**held, "parameters": held["parameters"] + self._uncounted_bytes}))

    def _exchange_traces(self, trainer: Any) -> None:
        """In a pipeline, keep the timelines of the last step; collective."""
        if PIPELINE_AXIS not in (trainer.strategy.device_mesh.mesh_dim_names or ()):
            return
        pipeline = trainer.strategy.pipeline
        schedule = pipeline.schedule(pipeline.num_micro_batches)
        self._pipeline = {
            "planned": [_spans(spans) for spans in schedule.simulate().ranks],
            "measured": [_spans(spans) for spans in pipeline.traces()],
        }
        self._held_by_action = []
        if pipeline.memory and trainer.strategy.root_device.type == "cpu":
            labels = ["step begins", *(str(span.action) for span in pipeline.trace)]
            held = [pipeline.memory_before, *pipeline.memory]
            self._held_by_action = [
                (label, {"total": size + self._uncounted_bytes}) for label, size in zip(labels, held, strict=True)
            ]

    def _add_point(self, trainer: Any, now: float) -> None:
        steps, elapsed = self._step - self._point_step, now - self._point_time
        values = {"seconds": elapsed / steps}
        if self._samples and elapsed > 0:
            values["samples_per_second"] = self._samples * num_data_ranks(trainer.strategy) / elapsed
        self._curves.add_point(self._step, values)
        self._point_step, self._point_time, self._samples = self._step, self._now(trainer), 0

    def _local_data(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        from weft.strategy.reports.report_table import report

        strategy = trainer.strategy
        mesh, device = strategy.device_mesh, strategy.root_device
        peak = memory.by_category(at="peak") if device.type != "cuda" else {"allocated": memory.peak(device)}
        if "parameters" in peak:
            peak["parameters"] += self._uncounted_bytes
        names = mesh.mesh_dim_names or ()
        return {
            "rank": trainer.global_rank,
            "stages": list(strategy.pipeline.stages) if PIPELINE_AXIS in names else [],
            "memory": {"peak": peak, "phases": self._held_by_action or self._phases},
            "times": self._times(device),
            "communication": self._communication,
            "plan": report(pl_module).to_dict(),
        }

    def _times(self, device: torch.device) -> dict[str, float | None]:
        if self._timer is None or self._step <= self._timed_from or not measures_waiting(device):
            return {"compute": None, "wait": None, "loader": None}
        total, loading, waiting = self._timer.means(self._step - self._timed_from)
        return {"compute": total - loading - waiting, "wait": waiting, "loader": loading}

    def _write(self, trainer: Any, status: str, ranks: list[dict[str, Any]]) -> None:
        """Write the report on rank 0, once for a training; what cannot be written is a warning."""
        directory, self._directory = self._directory, None
        if directory is None or not trainer.is_global_zero:
            return
        from weft.strategy.reports import run_data

        console = Console(trainer.strategy.fabric_module)
        try:
            path = run_data.write(directory, self._data(trainer, status, ranks))
        except Exception as error:  # other ranks do not wait here, and would wait for this one in other callbacks
            console.warn(f"weft: Report cannot write to {str(directory)!r} ({type(error).__name__}: {error}).")
        else:
            console.log(f"weft: the report of the run is {path}.")

    def _data(self, trainer: Any, status: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        strategy = trainer.strategy
        sizes = axis_sizes(strategy.device_mesh, strategy.groups)
        parts = [f"{_SHORT[name]}{size}" for name, size in sizes.items() if size > 1]
        return {
            "run": {
                "module": self._module_name,
                "status": status,
                "layout": ",".join(parts) or "tp1",
                "num_ranks": trainer.world_size,
                "num_steps": self._step,
                "mesh": [[name, size] for name, size in sizes.items()],
                "summary": list(strategy.start_summary),
                "facts": _facts(trainer),
            },
            "points": self._curves.points,
            "ranks": [{name: value for name, value in each.items() if name != "plan"} for each in ranks],
            "memory": {"predicted": self._predicted_bytes or strategy.predicted_bytes},
            "pipeline": self._pipeline,
            "plan": _grouped([(each["rank"], each["plan"]) for each in ranks]),
        }


class _StepWindow:
    """The time of a step, from the begin of its first batch, without validations; in seconds since 1970."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._pauses: list[list[float]] = []

    def batch_begins(self) -> None:
        if self._began is None:
            self._began = time.time()

    def pause(self) -> None:
        self._pauses.append([time.time(), math.inf])

    def resume(self) -> None:
        if self._pauses:
            self._pauses[-1][1] = time.time()

    def communication(self, strategy: Any) -> dict[str, Any]:
        """Return the calls and bytes that this rank has passed to groups of the backend `weft`, by axis, until now."""
        if self._began is None or strategy.root_device.type != "cpu":
            return {"axes": {}, "is_truncated": False}
        mesh = strategy.device_mesh
        axis_of = {
            mesh.get_group(dim).group_name: name for dim, name in enumerate(_axis_names(mesh)) if mesh.shape[dim] > 1
        }
        if strategy.context_parallel_group is not None:
            axis_of[strategy.context_parallel_group.group_name] = CONTEXT_AXIS
        if strategy.groups.experts is not None:
            axis_of[strategy.groups.experts.mesh[EXPERT_AXIS].get_group().group_name] = EXPERT_AXIS
        calls = flight.calls()
        found: dict[str, list[int]] = {}
        for call in calls:
            is_paused = any(first <= call["begin"] <= last for first, last in self._pauses)
            if call["begin"] >= self._began and not is_paused:
                entry = found.setdefault(axis_of.get(call["group"], "other groups"), [0, 0])
                entry[0] += 1
                entry[1] += call["bytes"]
        return {"axes": found, "is_truncated": len(calls) >= _MOST_CALLS and calls[0]["begin"] > self._began}


def _axis_names(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"axis{dim}" for dim in range(mesh.ndim))


def _num_samples(batch: Any) -> int:
    """Return the size of the first dim of a batch's first tensor; 0 without one."""
    try:
        return first_dim(batch)
    except ValueError:
        return 0


def _spans(spans: Any) -> list[list[Any]]:
    return [[s.action.kind, s.action.stage, s.action.micro_batch, s.start, s.end] for s in spans]


def _grouped(plans: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each distinct plan once, with the ranks that have it."""
    groups: dict[str, dict[str, Any]] = {}
    for rank, plan in plans:
        key = json.dumps([plan["parameters"], plan["notes"]])
        entry = groups.setdefault(key, {"ranks": [], "parameters": plan["parameters"], "notes": plan["notes"]})
        entry["ranks"].append(rank)
    return list(groups.values())


def _facts(trainer: Any) -> dict[str, str]:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host of rank 0": socket.gethostname(),
        "device": f"{name} ({device.type})",
        "precision": str(trainer.precision),
        "batches accumulated": str(trainer.accumulate_grad_batches),
        "weft": weft.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
