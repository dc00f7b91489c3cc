"""Searches the layouts of any module: each candidate is a dry run, which predicts memory and time."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

from weft.strategy._plan import Cluster
from weft.strategy.dry_run.process import DryRunProcess, ProcessEndedError
from weft.strategy.dry_run.request import CHECKPOINTING, Request
from weft.strategy.plan import Plan
from weft.strategy.tuning.request import memory_limit_of, read_cluster, read_fixed
from weft.strategy.tuning.result import Tuning
from weft.strategy.tuning.result_cache import ResultCache
from weft.strategy.tuning.trials import Trial, Trials, Variant

_AXES = ("data_replicate", "data_parallel", "tensor_parallel")
# Options of a dry run that a search chooses, or does not support.
_CHOSEN = ("layout", "rank", "num_rows", "accumulate_grad_batches")
_PIPELINE = ("pipeline_cuts", "pipeline_schedule", "num_micro_batches", "pipeline_module")
# Attributes of a search on which its result depends, beside the request, the cluster and the memory.
_ATTRIBUTES_OF_KEY = ("num_devices", "fixed", "max_results", "choices", "keeps_batch")
_PRINTED = ("optimizer_state", "master_weights")
_ZERO_STAGES = (3, 2, 1)  # replicas are another axis
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
    **options: Any,
) -> Tuning:
    """Return the layouts of a module with the shortest predicted steps that fit.

    Tries replicas x data-parallel (ZeRO stages 1 to 3) x tensor-parallel ranks. Where a layout does not fit, it also
    tries sequence parallelism, activation checkpointing, smaller batches whose gradients are accumulated, and steps in
    the backward. Layouts are compared by the rows (the first dim of the batch's tensors) of all ranks per second. A
    script must call this function under `if __name__ == "__main__"`.

    Args:
        module, options: those of `weft.strategy.dry_run.estimate_module`, without layout, rank and those of pipelines.
            Those that the search would choose are kept if they are given and not None. `batch` is that of one rank if
            all ranks are data-parallel.
        cluster: a name, or the mapping or file of one (see `read_cluster`). With "cpu", or a cluster like it, operators
            are timed on this host; otherwise their times come from the cluster's rates.
        memory: the most bytes of a device, such as "72GB"; None: nine tenths of a GPU's memory, or all of a CPU rank's.
        global_rows: rows of a step, over all ranks; None: those of the batch times the devices.
        keeps_batch: each data-parallel rank gets the batch as it is, so that the rows of a step depend on the layout.
        fixed: sizes that are not chosen, such as "tp=2".
        cache: from which the result is read, if an earlier search has written it for the same training, and to which it
            is written otherwise. The training is the same if a dry run of one step has the same modules, operators and
            bytes. A plan of a function is not kept.

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
    if unknown := [name for name in sizes if name not in (*_AXES, "accumulate_grad_batches", "zero_stage")]:
        raise ValueError(
            f"tune: got a fixed size of {unknown[0]} for a module, for which no pipelines are compared; fix rep, dp, "
            "tp, accumulate or zero."
        )
    options = {name: value for name, value in options.items() if value is not None}
    if "zero_stage" in sizes:
        options["zero_stage"] = sizes.pop("zero_stage")
    if options.get("zero_stage") == 1 and not _may_shard_states(options):
        raise ValueError(
            "tune: got zero_stage 1 with optimizer_in_backward, optimizer_state or master_weights, which need another "
            "stage; use 3, or leave one of them out."
        )
    rates = read_cluster(cluster)
    search = _Search(
        Request(module, **options),
        num_devices,
        rates,
        memory_limit_of(rates, memory),
        sizes,
        max_results,
        choices=_Choices.beside(options),
        keeps_batch=keeps_batch,
    )
    return search.run(global_rows, {name: options[name] for name in _PRINTED if name in options}, cache)


def _may_shard_states(options: dict[str, Any]) -> bool:
    """Return whether zero_stage=1 goes with the other options."""
    has_formats = any(options.get(name, "float32") != "float32" for name in _PRINTED)
    return not options.get("optimizer_in_backward") and not has_formats


@dataclasses.dataclass(frozen=True)
class _Choices:
    """The values that a search tries, except for the sizes of axes and the batches.

    The first ones are tried first; the others only for layouts that do not fit with these.
    """

    zero_stages: tuple[int, ...]
    checkpointing: tuple[str, ...]
    steps_in_backward: tuple[bool, ...]
    sequence_parallel: tuple[bool, ...]

    @classmethod
    def beside(cls, options: dict[str, Any]) -> _Choices:
        """Return all values of what `options` do not have, without those that exclude each other."""
        in_backward = options.get("optimizer_in_backward")
        stages = _ZERO_STAGES if _may_shard_states(options) else _ZERO_STAGES[:-1]
        return cls(
            (options["zero_stage"],) if "zero_stage" in options else stages,
            (options["activation_checkpointing"],) if "activation_checkpointing" in options else CHECKPOINTING,
            (False, True) if in_backward is None else (in_backward,),
            (options["sequence_parallel"],) if "sequence_parallel" in options else (False, True),
        )

    def variants_of(self, base: Variant) -> Iterator[Variant]:
        """Yield a layout with each possible value of `steps_in_backward` and `sequence_parallel`."""
        shards_states = base.zero_stage == 1 and base.data_parallel > 1
        steps = self.steps_in_backward[:1] if shards_states else self.steps_in_backward
        tokens = self.sequence_parallel if base.tensor_parallel > 1 else self.sequence_parallel[:1]
        for in_backward, is_sharded in itertools.product(steps, tokens):
            yield dataclasses.replace(base, optimizer_in_backward=in_backward, sequence_parallel=is_sharded)


class _Search:
    """Branch and bound: see `_find`."""

    def __init__(
        self,
        request: Request,
        num_devices: int,
        cluster: Cluster,
        memory_limit: int,
        fixed: dict[str, int],
        max_results: int,
        *,
        choices: _Choices,
        keeps_batch: bool,
    ) -> None:
        self._request = request
        self._num_devices = num_devices
        self._cluster = cluster
        self._limit = memory_limit
        self._fixed = fixed
        self._max_results = max_results
        self._choices = choices
        self._keeps_batch = keeps_batch
        self._global_rows: int | None = None
        self._rejections: dict[str, str] = {}  # by the layout
        self._first_error: RuntimeError | None = None

    def run(self, global_rows: int | None, printed: dict[str, Any], cache: ResultCache | None) -> Tuning:
        with DryRunProcess() as process:
            # The rows of a step are not known yet.
            self._trials = Trials(process, self._request, self._cluster, None)
            key = None if cache is None else self._key(cache, global_rows)
            found = None if cache is None or key is None else cache.load(key)
            if found is None:
                if not self._keeps_batch:
                    self._global_rows = self._rows_of_step() if global_rows is None else global_rows
                self._trials = Trials(process, self._request, self._cluster, self._global_rows)
                found = self._find(printed)
                if cache is not None and key is not None:
                    cache.store(key, found)
            return found

    def _key(self, cache: ResultCache, global_rows: int | None) -> str | None:
        """Return the key of this search; None: the plan is a function, or the first layout is not possible."""
        plan = Plan(self._request.plan)
        first = next(self._layouts(), None)
        try:
            rules = plan.preset or plan.to_json()
            if first is None:
                return None
            prediction = self._trials.predict(first, has_times=False, num_steps=1, is_traced=True)
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
        same number of replicas computes. When the search reaches it, a dry run of the layout gives the next bound; and
        when it reaches that, the fastest variant that fits is found.
        """
        layouts = list(self._layouts())
        if not layouts:
            raise ValueError(
                f"tune: got {self._num_devices} devices, which no layout divides with the sizes that are fixed; fix "
                "other sizes."
            )
        waiting: dict[tuple[int, int], list[Variant]] = {}  # for replicas, by data-parallel and tensor-parallel ranks
        queue: list[tuple[float, int, Variant, Trial | None]] = []
        order = itertools.count()
        groups = {_group_of(layout) for layout in layouts if layout.data_parallel == 1}
        for layout in layouts:
            if layout.data_parallel > 1 and _group_of(layout) in groups:
                waiting.setdefault(_group_of(layout), []).append(layout)
            else:
                heapq.heappush(queue, (0.0, next(order), layout, None))
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
                is_mixed = self._request.precision.endswith("-mixed")
                least = 0.0 if base is None or is_mixed else _LEAST_COMPUTING * base.computing_seconds
                for each in waiting.pop(_group_of(layout), ()) if layout.data_parallel == 1 else ():
                    heapq.heappush(queue, (least, next(order), each, None))
                continue
            fitting = base if self._fits(base) else self._fitting_variant(base)
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

    def _layouts(self) -> Iterator[Variant]:
        """Yield layouts without batches; those with fewer tensor-parallel ranks, which most models allow, first."""
        for tensor in _divisors(self._num_devices):
            for data in reversed(_divisors(self._num_devices // tensor)):
                sizes = dict(zip(_AXES, (self._num_devices // tensor // data, data, tensor), strict=True))
                if any(self._fixed.get(axis, size) != size for axis, size in sizes.items()):
                    continue
                for zero_stage in self._choices.zero_stages if data > 1 else self._choices.zero_stages[:1]:
                    yield Variant(
                        **sizes,
                        zero_stage=zero_stage,
                        num_batches=self._fixed.get("accumulate_grad_batches", 1),
                        activation_checkpointing=self._choices.checkpointing[0],
                        optimizer_in_backward=self._choices.steps_in_backward[0],
                        sequence_parallel=self._choices.sequence_parallel[0],
                    )

    def _base(self, layout: Variant) -> Trial | None:
        """Return a dry run of a layout in its fastest variant; None: the layout is not possible."""
        num_batches = min(self._batch_counts(layout), default=None)
        if num_batches is None:
            return None
        try:
            return self._trials.run(dataclasses.replace(layout, num_batches=num_batches))
        except ProcessEndedError:
            raise
        except ValueError as error:
            self._reject(layout, str(error).removeprefix("estimate: "))
        except RuntimeError as error:  # of the module, perhaps for the number of rows
            self._first_error = self._first_error or error
            self._reject(layout, str(error).strip().splitlines()[-1])
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
        for layout in self._layouts():
            try:
                return self._trials.predict(layout, has_times=False, num_steps=1).num_rows * self._num_devices
            except ValueError as error:
                self._reject(layout, str(error).removeprefix("estimate: "))
        return 0

    def _batch_counts(self, layout: Variant) -> list[int]:
        """Return the numbers of batches into which a data-parallel rank can divide its rows of a step."""
        fixed = self._fixed.get("accumulate_grad_batches")
        if self._global_rows is None:
            return [fixed or 1]
        if self._global_rows == 0 or self._global_rows % layout.num_data:
            return []
        counts = _divisors(self._global_rows // layout.num_data)
        return counts if fixed is None else [count for count in counts if count == fixed]

    # ---- variants that fit -----------------------------------------------------------------------------------

    def _fitting_variant(self, base: Trial) -> Trial | None:
        """Return the fastest variant of a layout that fits; None: none does.

        Assumes that more batches take no less time, so that for each kind of checkpointing, the fewest batches that fit
        are the fastest. More batches also take less memory, except that the second one adds sums of gradients. So none
        fits if, with the last kind of checkpointing, neither one batch nor the most that are possible do.
        """
        found = (self._fitting_with(variant) for variant in self._choices.variants_of(base.variant))
        return min((trial for trial in found if trial is not None), key=_seconds, default=None)

    def _fitting_with(self, variant: Variant) -> Trial | None:
        def with_batches(num_batches: int, checkpointing: str) -> Trial | None:
            return self._trials.try_to_run(
                dataclasses.replace(variant, num_batches=num_batches, activation_checkpointing=checkpointing)
            )

        counts, kinds = self._batch_counts(variant), self._choices.checkpointing
        most = (with_batches(num_batches, kinds[-1]) for num_batches in counts[:0:-1])
        ends = [with_batches(counts[0], kinds[-1]), next((trial for trial in most if trial is not None), None)]
        fitting = min((each for each in ends if each is not None and self._fits(each)), key=_seconds, default=None)
        if fitting is None:
            return None
        for checkpointing in kinds:
            for num_batches in counts:
                trial = with_batches(num_batches, checkpointing)
                if trial is None:
                    continue
                if trial.seconds >= fitting.seconds:
                    break
                if self._fits(trial):
                    fitting = trial
                    break
        return fitting

    def _fits(self, trial: Trial) -> bool:
        return trial.peak_bytes <= self._limit


def _group_of(layout: Variant) -> tuple[int, int]:
    return layout.num_data, layout.tensor_parallel


def _seconds(trial: Trial) -> float:
    return trial.seconds


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _plan_text(plan: Any) -> Any:
    """Return the text of the option `plan` of a strategy; of a function, its name, to be replaced by the function."""
    if isinstance(plan, str):
        return plan
    plan = Plan(plan)
    try:
        return plan.preset or plan.to_json()
    except ValueError:
        return str(plan)
