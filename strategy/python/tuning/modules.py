"""Searches the layouts of any module: each candidate is a dry run, which predicts memory and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from weft.strategy._plan import Cluster
from weft.strategy.dry_run.process import DryRunProcess, ProcessEndedError
from weft.strategy.dry_run.request import CHECKPOINTING, Request
from weft.strategy.dry_run.training import Prediction
from weft.strategy.plan import Plan
from weft.strategy.tuning.request import memory_limit_of, read_cluster, read_fixed
from weft.strategy.tuning.result import FoundLayout, Tuning, layout_text

_AXES = ("data_replicate", "data_parallel", "tensor_parallel")
# Options of a dry run that a search chooses, or does not support.
_CHOSEN = ("layout", "rank", "num_rows", "accumulate_grad_batches")
_PIPELINE = ("pipeline_cuts", "pipeline_schedule", "num_micro_batches", "pipeline_module")
_PRINTED = ("sequence_parallel", "zero_stage", "optimizer_state", "master_weights")


def tune_module(
    module: Any,
    num_devices: int,
    *,
    cluster: str | Any = "h100",
    memory: str | int | None = None,
    global_rows: int | None = None,
    keeps_batch: bool = False,
    fixed: str = "",
    max_results: int = 5,
    **options: Any,
) -> Tuning:
    """Return the layouts of a module with the shortest predicted steps that fit.

    Tries replicas x data-parallel x tensor-parallel ranks. Where a layout does not fit, it also tries activation
    checkpointing, smaller batches whose gradients are accumulated, and steps in the backward. Layouts are compared by
    the rows (the first dim of the batch's tensors) of all ranks per second. A script must call this function under
    `if __name__ == "__main__"`.

    Args:
        module, options: those of `weft.strategy.dry_run.estimate_module`, without layout, rank and those of pipelines.
            `batch` is that of one rank if all ranks are data-parallel.
        cluster: a name, or the mapping or file of one (see `read_cluster`). With "cpu", or a cluster like it, operators
            are timed on this host; otherwise their times come from the cluster's rates.
        memory: the most bytes of a device, such as "72GB"; None: nine tenths of a GPU's memory, or all of a CPU rank's.
        global_rows: rows of a step, over all ranks; None: those of the batch times the devices.
        keeps_batch: each data-parallel rank gets the batch as it is, so that the rows of a step depend on the layout.
        fixed: sizes that are not chosen, such as "tp=2".

    Raises:
        ValueError: an argument is not valid, or no layout is possible.
        RuntimeError: the module raised an error.
    """
    if unknown := [name for name in (*_CHOSEN, *_PIPELINE) if name in options]:
        raise ValueError(f"tune: got the option {unknown[0]}, which the search chooses or does not have; leave it out.")
    if num_devices < 1:
        raise ValueError(f"tune: got num_devices = {num_devices}; give a number from 1.")
    if options.get("optimizer_in_backward") == "rows":
        raise ValueError(
            "tune: got optimizer_in_backward='rows', which excludes data-parallel ranks and accumulation; use True, or "
            "leave it out."
        )
    sizes = read_fixed(fixed)
    if unknown := [name for name in sizes if name not in (*_AXES, "accumulate_grad_batches")]:
        raise ValueError(
            f"tune: got a fixed size of {unknown[0]} for a module, for which no pipelines and no ZeRO stages are "
            "compared; fix rep, dp, tp or accumulate, and give zero_stage as an option."
        )
    rates = read_cluster(cluster)
    search = _Search(
        Request(module, **options),
        num_devices,
        rates,
        memory_limit_of(rates, memory),
        sizes,
        max_results,
        chooses_checkpointing="activation_checkpointing" not in options,
        chooses_in_backward="optimizer_in_backward" not in options and options.get("zero_stage") != 1,
        keeps_batch=keeps_batch,
    )
    return search.run(global_rows, {name: options[name] for name in _PRINTED if name in options})


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A dry run of a layout."""

    request: Request
    prediction: Prediction
    rows_of_step: int

    @property
    def step_seconds(self) -> float:
        assert self.prediction.times is not None
        return sum(self.prediction.times.seconds.values())

    @property
    def seconds(self) -> float:
        """The seconds of a row."""
        return self.step_seconds / self.rows_of_step

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes by category of the phase with the most."""
        return max(self.prediction.phases.values(), key=lambda usage: sum(usage.values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())


class _Search:
    def __init__(
        self,
        request: Request,
        num_devices: int,
        cluster: Cluster,
        memory_limit: int,
        fixed: dict[str, int],
        max_results: int,
        *,
        chooses_checkpointing: bool,
        chooses_in_backward: bool,
        keeps_batch: bool,
    ) -> None:
        self._request = request
        self._num_devices = num_devices
        self._cluster = cluster
        self._limit = memory_limit
        self._fixed = fixed
        self._max_results = max_results
        self._checkpointing = CHECKPOINTING if chooses_checkpointing else (request.activation_checkpointing,)
        self._chooses_in_backward = chooses_in_backward
        self._keeps_batch = keeps_batch
        self._global_rows = 0
        self._rejections: dict[str, str] = {}  # by the layout
        self._trials: dict[tuple[str, int, str, bool], _Trial] = {}
        self._smallest: _Trial | None = None

    def run(self, global_rows: int | None, printed: dict[str, Any]) -> Tuning:
        with DryRunProcess() as self._process:
            bases = self._bases(global_rows)
            found: list[tuple[_Trial, _Trial]] = []  # with the base, for the model's operations
            num_above_limit = 0
            for base in bases:
                is_done = len(found) >= self._max_results
                if is_done and base.seconds >= sorted(each.seconds for each, _ in found)[self._max_results - 1]:
                    break
                fitting = base if self._fits(base) else self._fitting_variant(base)
                if fitting is None:
                    num_above_limit += 1
                else:
                    found.append((fitting, base))
        found.sort(key=lambda pair: pair[0].seconds)
        smallest = None if found or self._smallest is None else self._layout(self._smallest, self._smallest)
        return Tuning(
            layouts=tuple(self._layout(*pair) for pair in found[: self._max_results]),
            smallest=smallest,
            num_devices=self._num_devices,
            devices_per_host=self._cluster.devices_per_host,
            memory_limit=self._limit,
            global_sequences=None if self._keeps_batch else self._global_rows,
            tokens=None,
            cluster=self._cluster.name,
            num_candidates=len(bases),
            num_above_limit=num_above_limit,
            rejections=tuple(self._rejections.items()),
            plan=_plan_text(self._request.plan),
            precision=self._request.precision,
            options=printed,
        )

    # ---- candidates ----------------------------------------------------------------------------------------

    def _bases(self, global_rows: int | None) -> list[_Trial]:
        """Return a dry run of each layout in its fastest variant, the fastest first."""
        layouts = list(self._layouts())
        if not layouts:
            raise ValueError(
                f"tune: got {self._num_devices} devices, which no layout divides with the sizes that are fixed; fix "
                "other sizes."
            )
        bases = []
        first_error: RuntimeError | None = None
        for sizes in layouts:
            if self._global_rows == 0 and not self._keeps_batch:
                self._global_rows = self._rows_of_step(sizes, global_rows)
            batches = min(self._batch_counts(sizes), default=None)
            if batches is None:
                continue
            try:
                bases.append(self._run(sizes, batches, self._checkpointing[0], False))
            except ProcessEndedError:
                raise
            except ValueError as error:
                self._rejections[layout_text(sizes)] = str(error).removeprefix("estimate: ")
            except RuntimeError as error:  # of the module, perhaps for the number of rows
                first_error = first_error or error
                self._rejections[layout_text(sizes)] = str(error).strip().splitlines()[-1]
        if not bases and first_error is not None:
            raise first_error
        if not bases and self._rejections:
            raise ValueError(
                f"tune: no layout of {self._num_devices} devices is valid: {next(iter(self._rejections.values()))}"
            )
        if not bases:
            raise ValueError(
                f"tune: got {self._num_devices} devices and {self._global_rows} rows for a step, which no layout "
                "divides with the sizes that are fixed; give a multiple of the data-parallel ranks, or fix other sizes."
            )
        return sorted(bases, key=lambda base: base.seconds)

    def _layouts(self) -> Iterator[dict[str, int]]:
        """Yield the sizes of the axes; those with fewer tensor-parallel ranks, which most models allow, first."""
        for tensor in _divisors(self._num_devices):
            for data in reversed(_divisors(self._num_devices // tensor)):
                sizes = dict(zip(_AXES, (self._num_devices // tensor // data, data, tensor), strict=True))
                if all(self._fixed.get(axis, size) == size for axis, size in sizes.items()):
                    yield sizes

    def _rows_of_step(self, sizes: dict[str, int], given: int | None) -> int:
        """Return the rows of a step; 0: a dry run of the layout, which has to find the rows of the batch, fails."""
        if given is not None or self._keeps_batch:
            return given or 0
        try:
            prediction = self._predict(dataclasses.replace(self._request, layout=layout_text(sizes)))
        except ValueError as error:
            self._rejections[layout_text(sizes)] = str(error).removeprefix("estimate: ")
            return 0
        return prediction.num_rows * self._num_devices

    def _batch_counts(self, sizes: dict[str, int]) -> list[int]:
        """Return the numbers of batches into which a data-parallel rank can divide its rows of a step."""
        num_data = sizes["data_replicate"] * sizes["data_parallel"]
        fixed = self._fixed.get("accumulate_grad_batches")
        if self._keeps_batch:
            return [fixed or 1]
        if self._global_rows == 0 or self._global_rows % num_data:
            return []
        counts = _divisors(self._global_rows // num_data)
        return counts if fixed is None else [count for count in counts if count == fixed]

    def _fitting_variant(self, base: _Trial) -> _Trial | None:
        """Return the fastest variant of a layout that fits; None: none does.

        Assumes that more batches take no less time, so that for each kind of checkpointing, the fewest batches that fit
        are the fastest. More batches also take less memory, except that the second one adds sums of gradients. So none
        fits if, with the last kind of checkpointing, neither one batch nor the most that are possible do.
        """
        sizes = dict(zip(_AXES, tuple(base.request.sizes)[1:], strict=True))
        choices = (False, True) if self._chooses_in_backward else (False,)
        found = (self._fitting_with(sizes, in_backward) for in_backward in choices)
        return min((trial for trial in found if trial is not None), key=_seconds, default=None)

    def _fitting_with(self, sizes: dict[str, int], in_backward: bool) -> _Trial | None:
        counts = self._batch_counts(sizes)
        ends = [self._try(sizes, counts[0], self._checkpointing[-1], in_backward)]
        ends.append(self._first_possible(sizes, counts[:0:-1], in_backward))
        fitting = min((each for each in ends if each is not None and self._fits(each)), key=_seconds, default=None)
        if fitting is None:
            return None
        for checkpointing in self._checkpointing:
            for batches in counts:
                trial = self._try(sizes, batches, checkpointing, in_backward)
                if trial is None:
                    continue
                if trial.seconds >= fitting.seconds:
                    break
                if self._fits(trial):
                    fitting = trial
                    break
        return fitting

    def _first_possible(self, sizes: dict[str, int], counts: list[int], in_backward: bool) -> _Trial | None:
        """Return the trial of the first number of batches with which the module runs, and the least memory."""
        trials = (self._try(sizes, batches, self._checkpointing[-1], in_backward) for batches in counts)
        return next((trial for trial in trials if trial is not None), None)

    # ---- dry runs --------------------------------------------------------------------------------------------

    def _try(self, sizes: dict[str, int], batches: int, checkpointing: str, in_backward: bool) -> _Trial | None:
        """Run a variant of a layout that is possible; None: the variant is not, as with one row in a batch norm."""
        try:
            return self._run(sizes, batches, checkpointing, in_backward)
        except ProcessEndedError:
            raise
        except (ValueError, RuntimeError):
            return None

    def _run(self, sizes: dict[str, int], batches: int, checkpointing: str, in_backward: bool) -> _Trial:
        key = (layout_text(sizes), batches, checkpointing, in_backward)
        if key in self._trials:
            return self._trials[key]
        num_data = sizes["data_replicate"] * sizes["data_parallel"]
        request = dataclasses.replace(
            self._request,
            layout=layout_text(sizes),
            num_rows=None if self._keeps_batch else self._global_rows // num_data // batches,
            accumulate_grad_batches=batches,
            activation_checkpointing=checkpointing,
            optimizer_in_backward=in_backward or self._request.optimizer_in_backward,
        )
        prediction = self._predict(request)
        num_rows = prediction.num_rows if request.num_rows is None else request.num_rows
        trial = self._trials[key] = _Trial(request, prediction, num_rows * num_data * batches)
        if self._smallest is None or trial.peak_bytes < self._smallest.peak_bytes:
            self._smallest = trial
        return trial

    def _predict(self, request: Request) -> Prediction:
        """Return the prediction for rank 0, whose shards are the largest."""
        return self._process.run(dataclasses.replace(request, rank=0), self._cluster)[0]

    def _fits(self, trial: _Trial) -> bool:
        return trial.peak_bytes <= self._limit

    def _layout(self, trial: _Trial, base: _Trial) -> FoundLayout:
        request, times, base_times = trial.request, trial.prediction.times, base.prediction.times
        assert times is not None and base_times is not None
        is_half = self._request.precision != "32-true"
        rate = self._cluster.half_flops if is_half else self._cluster.float32_flops
        return FoundLayout(
            layout=request.layout,
            sequences=trial.prediction.num_rows if request.num_rows is None else request.num_rows,
            accumulate_grad_batches=request.accumulate_grad_batches,
            activation_checkpointing=request.activation_checkpointing,
            optimizer_in_backward=request.optimizer_in_backward is not False,
            seconds=times.seconds,
            bytes=trial.bytes,
            sent_bytes=round(times.sent_bytes),
            throughput=trial.rows_of_step / trial.step_seconds,
            flops_share=base_times.flops / rate / trial.step_seconds,
        )


def _seconds(trial: _Trial) -> float:
    return trial.seconds


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _plan_text(plan: Any) -> Any:
    return plan if isinstance(plan, str) else Plan(plan).to_json()
