"""Searches the layouts of any module: each candidate is a dry run, which predicts memory and time."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import pickle
from collections.abc import Callable
from typing import Any

from weft.strategy._plan import SCHEDULES, Cluster
from weft.strategy.dry_run.process import DryRunProcess, ProcessEndedError
from weft.strategy.dry_run.request import Request
from weft.strategy.plan import Plan
from weft.strategy.tuning.fitting import FittingVariants
from weft.strategy.tuning.module_choices import FORMATS, Choices, may_shard_states
from weft.strategy.tuning.request import memory_limit_of, read_cluster, read_fixed
from weft.strategy.tuning.result import Tuning
from weft.strategy.tuning.result_cache import ResultCache
from weft.strategy.tuning.trials import Trial, Trials, Variant

# Options of a dry run that a search chooses.
_CHOSEN = ("layout", "rank", "num_rows", "accumulate_grad_batches")
# Options of dry runs with a pipeline; `Choices` has the others.
_OF_STAGES = ("pipeline_cuts", "pipeline_module")
# Attributes of a search on which its result depends, beside the request, the cluster and the memory.
_ATTRIBUTES_OF_KEY = ("num_devices", "max_results", "choices", "stage_options", "keeps_batch")
# The least share of the computing time of replicas for which ranks compute that shard instead: they run the same
# operators, without the copies of gradients into buckets. In mixed precision there is none, because FSDP2 saves casts.
_LEAST_COMPUTING = 0.9


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
    cache: ResultCache | None = None,
    report: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Tuning:
    """Return the layouts of a module with the shortest predicted steps that fit.

    Tries pipeline ranks x replicas x data-parallel (ZeRO stages 1 to 3) x tensor-parallel ranks, a pipeline with
    several numbers of micro-batches. Where a layout does not fit, it also tries sequence parallelism, activation
    checkpointing, smaller batches whose gradients are accumulated, and steps in the backward. Layouts are compared by
    the rows (the first dim of the batch's tensors) of all ranks per second. A script must call this function under
    `if __name__ == "__main__"`.

    Args:
        module, options: those of `weft.strategy.dry_run.estimate_module`, without layout and rank. Those that the
            search would choose are kept if they are given and not None; those of pipelines do not matter to other
            layouts. `batch` is that of one rank if all ranks are data-parallel.
        cluster: a name, or the mapping or file of one (see `read_cluster`). With "cpu", or a cluster like it, operators
            are timed on this host; otherwise their times come from the cluster's rates.
        memory: the most bytes of a device, such as "72GB"; None: nine tenths of a GPU's memory, or all of a CPU rank's.
        global_rows: rows of a step, over all ranks; None: those of the batch times the devices.
        keeps_batch: each data-parallel rank gets the batch as it is, so that the rows of a step depend on the layout.
        fixed: sizes that are not chosen, such as "tp=2".
        cache: from which the result is read, if an earlier search has written it for the same training, and to which it
            is written otherwise. The training is the same if a dry run of one step has the same modules, operators and
            bytes. A plan of a function is not kept.
        report: called with a sentence about the search when it begins, and before each dry run.

    Raises:
        ValueError: an argument is not valid, or no layout is possible.
        RuntimeError: the module raised an error.
    """
    if unknown := [name for name in _CHOSEN if name in options]:
        raise ValueError(f"tune: got the option {unknown[0]}, which the search chooses; leave it out.")
    if num_devices < 1:
        raise ValueError(f"tune: got num_devices = {num_devices}; give a number from 1.")
    if options.get("optimizer_in_backward") == "rows":
        raise ValueError(
            "tune: got optimizer_in_backward='rows', which excludes data-parallel ranks and accumulation; use True, or "
            "leave it out."
        )
    sizes = read_fixed(fixed)
    options = {name: value for name, value in options.items() if value is not None}
    if "zero_stage" in sizes:
        options["zero_stage"] = sizes.pop("zero_stage")
    if options.get("zero_stage") == 1 and not may_shard_states(options):
        raise ValueError(
            "tune: got zero_stage 1 with optimizer_in_backward, optimizer_state or master_weights, which need another "
            "stage; use 3, or leave one of them out."
        )
    choices = Choices.beside(options, sizes)
    if (schedule := options.pop("pipeline_schedule", None)) not in (None, *SCHEDULES):
        raise ValueError(f"tune: pipeline_schedule is {schedule!r}; pass one of {', '.join(SCHEDULES)}.")
    options.pop("num_micro_batches", None)
    stage_options = {name: options.pop(name) for name in _OF_STAGES if name in options}
    rates = read_cluster(cluster)
    search = _Search(
        Request(module, **options),
        num_devices,
        rates,
        memory_limit_of(rates, memory),
        max_results,
        choices=choices,
        stage_options=stage_options,
        keeps_batch=keeps_batch,
        report=report,
    )
    return search.run(global_rows, {name: options[name] for name in FORMATS if name in options}, cache)


class _Search:
    """Branch and bound: see `_find`."""

    def __init__(
        self,
        request: Request,
        num_devices: int,
        cluster: Cluster,
        memory_limit: int,
        max_results: int,
        *,
        choices: Choices,
        stage_options: dict[str, Any],
        keeps_batch: bool,
        report: Callable[[str], None],
    ) -> None:
        self._request = request
        self._num_devices = num_devices
        self._cluster = cluster
        self._limit = memory_limit
        self._max_results = max_results
        self._choices = choices
        self._stage_options = stage_options
        self._keeps_batch = keeps_batch
        self._report = report
        self._global_rows: int | None = None
        self._rejections: dict[str, str] = {}  # by the layout
        self._first_error: RuntimeError | None = None

    def run(self, global_rows: int | None, printed: dict[str, Any], cache: ResultCache | None) -> Tuning:
        with DryRunProcess() as process:
            # The rows of a step are not known yet.
            self._trials = self._new_trials(process)
            key = None if cache is None else self._key(cache, global_rows)
            found = None if cache is None or key is None else cache.load(key)
            if found is None:
                if not self._keeps_batch:
                    self._global_rows = self._rows_of_step() if global_rows is None else global_rows
                self._trials = self._new_trials(process)
                found = self._find(printed)
                if cache is not None and key is not None:
                    cache.store(key, found)
            return found

    def _new_trials(self, process: DryRunProcess) -> Trials:
        options = (self._global_rows, self._stage_options, self._report)
        return Trials(process, self._request, self._cluster, *options)

    def _key(self, cache: ResultCache, global_rows: int | None) -> str | None:
        """Return the key of this search; None: the plan is a function, or the first layout is not possible."""
        plan = Plan(self._request.plan)
        first = next(self._choices.layouts(self._num_devices), None)
        try:
            rules = plan.preset or plan.to_json()
            if first is None:
                return None
            prediction = self._trials.predict(first.with_batches(1), has_times=False, num_steps=1, is_traced=True)
        except ProcessEndedError:
            raise
        except (ValueError, RuntimeError):
            return None
        names = [field.name for field in dataclasses.fields(Request) if field.name not in ("module", "batch", "plan")]
        return cache.key_of(
            digest=prediction.digest,
            plan=(rules, plan.verify, plan.sequence_parallel),
            request={name: getattr(self._request, name) for name in names},
            cluster=pickle.dumps(self._cluster).hex(),
            limit=self._limit,
            global_rows=global_rows,
            **{name: getattr(self, f"_{name}") for name in _ATTRIBUTES_OF_KEY},
        )

    def _find(self, printed: dict[str, Any]) -> Tuning:
        """Search in the order of bounds of the time.

        In full precision, the bound of a layout in which data-parallel ranks shard is a share of the time for which the
        same number of replicas computes; that of a pipeline follows from replicas in place of its stages. When the
        search reaches it, a dry run of the layout gives the next bound; and when it reaches that, the fastest variant
        that fits is found.
        """
        layouts = list(self._choices.layouts(self._num_devices))
        if not layouts:
            raise ValueError(
                f"tune: got {self._num_devices} devices, which no layout divides with the sizes that are fixed "
                f"({', '.join(f'{axis}={size}' for axis, size in self._choices.sizes.items())}); fix other sizes."
            )
        num_stages = sum(layout.has_stages for layout in layouts)
        with_stages = f", {num_stages} of them with a pipeline" if num_stages else ""
        self._report(f"{len(layouts)} layouts to compare{with_stages}, by dry runs of those that may be the fastest.")
        waiting: dict[int, list[Variant]] = {}  # for replicas, by tensor-parallel ranks
        queue: list[tuple[float, int, Variant, Trial | None]] = []
        order = itertools.count()
        groups = {layout.tensor_parallel for layout in layouts if _is_first(layout)}
        for layout in layouts:
            if not _is_first(layout) and layout.tensor_parallel in groups:
                waiting.setdefault(layout.tensor_parallel, []).append(layout)
            else:
                heapq.heappush(queue, (0.0, next(order), layout, None))
        fitting_of = FittingVariants(self._trials, self._choices, self._global_rows, self._limit).fastest
        found: list[tuple[Trial, Trial]] = []  # with the base, for the model's operations
        num_above_limit = num_rejected = 0
        while queue:
            bound, _, layout, base = heapq.heappop(queue)
            is_done = len(found) >= self._max_results
            if is_done and bound >= sorted(each.seconds for each, _ in found)[self._max_results - 1]:
                break
            if base is None:
                base = self._base(layout)
                if base is not None:
                    heapq.heappush(queue, (base.seconds, next(order), layout, base))
                num_rejected += base is None
                for each in waiting.pop(layout.tensor_parallel, ()) if _is_first(layout) else ():
                    heapq.heappush(queue, (self._bound(each, base), next(order), each, None))
                continue
            fitting = base if base.peak_bytes <= self._limit else fitting_of(base.variant)
            if fitting is None:
                num_above_limit += 1
            else:
                found.append((fitting, base))
        if num_rejected == len(layouts):
            raise self._nothing_is_valid()
        found.sort(key=lambda pair: pair[0].seconds)
        return self._result(found, num_above_limit, len(layouts) - num_rejected, printed)

    def _result(
        self, found: list[tuple[Trial, Trial]], num_above_limit: int, num_candidates: int, printed: dict[str, Any]
    ) -> Tuning:
        is_half = self._request.precision != "32-true"
        rate = self._cluster.half_flops if is_half else self._cluster.float32_flops
        smallest = None if found else self._trials.smallest
        return Tuning(
            layouts=tuple(trial.to_layout(base, rate) for trial, base in found[: self._max_results]),
            smallest=None if smallest is None else smallest.to_layout(smallest, rate),
            num_devices=self._num_devices,
            devices_per_host=self._cluster.devices_per_host,
            memory_limit=self._limit,
            global_sequences=self._global_rows,
            tokens=None,
            cluster=self._cluster.name,
            num_candidates=num_candidates,
            num_above_limit=num_above_limit,
            rejections=tuple(self._rejections.items()),
            plan=_plan_text(self._request.plan),
            precision=self._request.precision,
            options=printed,
        )

    # ---- candidates ----------------------------------------------------------------------------------------

    def _bound(self, layout: Variant, first: Trial | None) -> float:
        """Return the least seconds of a row of a layout, by those of replicas with as many tensor-parallel ranks.

        The stages of 1F1B wait for at least as long as they take for the micro-batches of one rank less (Narayanan et
        al. 2019), unless the ranks share cores, which those that wait leave to the others.
        """
        if first is None or self._request.precision.endswith("-mixed"):
            return 0.0
        least = _LEAST_COMPUTING * first.computing_seconds
        counts = self._batch_counts(layout)
        if layout.pipeline_schedule != "1f1b" or not counts or self._cluster.slowdown(self._num_devices) > 1:
            return least
        return least * (1 + (layout.pipeline_parallel - 1) / counts[-1])

    def _base(self, layout: Variant) -> Trial | None:
        """Return a dry run of a layout in its fastest variant; None: the layout is not possible."""
        counts = self._batch_counts(layout)
        if layout.has_stages:
            return self._base_of_stages(layout, counts)
        return self._try(layout.with_batches(counts[0])) if counts else None

    def _base_of_stages(self, layout: Variant, counts: list[int]) -> Trial | None:
        """Climb from the second number of micro-batches: more of them wait less, and compute less efficiently."""
        start = min(1, len(counts) - 1)
        tried: dict[int, Trial | None] = {}

        def at(idx: int) -> Trial | None:
            if idx not in tried:
                tried[idx] = self._try(layout.with_batches(counts[idx])) if 0 <= idx < len(counts) else None
            return tried[idx]

        best = at(start) or at(start - 1)  # the batch as it is may have too few rows for the former
        for step in (1, -1):
            idx = start + step
            while best is not None and (trial := at(idx)) is not None and trial.seconds < best.seconds:
                best, idx = trial, idx + step
            if best is not at(start):
                break
        if best is not None:
            self._rejections.pop(layout.name, None)
        return best

    def _try(self, variant: Variant) -> Trial | None:
        try:
            return self._trials.run(variant)
        except ProcessEndedError:
            raise
        except ValueError as error:
            self._reject(variant, str(error).removeprefix("estimate: "))
        except RuntimeError as error:  # of the module, perhaps for the number of rows
            self._first_error = self._first_error or error
            self._reject(variant, str(error).strip().splitlines()[-1])
        return None

    def _reject(self, layout: Variant, reason: str) -> None:
        if self._rejections.get(layout.layout) != reason:  # the same with another ZeRO stage
            self._rejections[layout.name] = reason

    def _nothing_is_valid(self) -> Exception:
        if self._first_error is not None:
            return self._first_error
        if self._rejections:
            reason = next(iter(self._rejections.values()))
            return ValueError(f"tune: no layout of {self._num_devices} devices is valid: {reason}")
        return ValueError(
            f"tune: got {self._num_devices} devices and {self._global_rows} rows for a step, which no layout divides "
            "with the sizes that are fixed; give a multiple of the data-parallel ranks, or fix other sizes."
        )

    def _rows_of_step(self) -> int:
        """Return the rows of the batch times the devices; 0: no layout is valid."""
        for layout in self._choices.layouts(self._num_devices):
            try:
                prediction = self._trials.predict(layout.with_batches(1), has_times=False, num_steps=1)
                return prediction.num_rows * self._num_devices
            except ValueError as error:
                self._reject(layout, str(error).removeprefix("estimate: "))
        return 0

    def _batch_counts(self, layout: Variant) -> list[int]:
        return self._choices.batch_counts(layout, self._global_rows)


def _is_first(layout: Variant) -> bool:
    """Return whether the bounds of other layouts follow from this one, which shards by tensor-parallel ranks alone."""
    return not layout.has_stages and layout.data_parallel == 1


def _plan_text(plan: Any) -> Any:
    """Return the text of the option `plan` of a strategy; of a function, its name, to be replaced by the function."""
    if isinstance(plan, str):
        return plan
    plan = Plan(plan)
    try:
        return plan.preset or plan.to_json()
    except ValueError:
        return str(plan)
