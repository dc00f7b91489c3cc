"""The strategy's settings, and their validation before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.strategy.layout import MeshSizes, Sizes
    from weft.strategy.pipeline import AutoCuts

ZERO_STAGES = (0, 1, 2, 3)
_SEVERAL_STAGES = ("interleaved", "looped_bfs")  # schedules with several stages on a rank
_DEFAULT_SIZES = {
    "data_replicate_size": 1,
    "data_parallel_size": "auto",
    "tensor_parallel_size": "auto",
    "pipeline_parallel_size": 1,
}
_FLAGS = ("fused_optimizers", "empty_init", "activation_offload", "sequence_parallel")


@dataclass(frozen=True)
class PlanSettings:
    """The arguments of weft's strategies beyond Lightning's own.

    plan: as in `weft.parallelize` ("auto", a dict, YAML text or path, a callable, a Plan), or None:
        behave as Lightning's ModelParallelStrategy.
    check_batches: compare this many batches at the start of each stage between the ranks of a tensor-parallel group.
    check_batches_every: compare every N-th batch as well; 0: no others.
    fused_optimizers: whether optimizers of torch become their fused variants.
    empty_init: whether models built in the strategy's contexts are deferred, and materialized as shards only.
    optimizer_in_backward: whether each parameter is stepped as soon as its gradient is complete; "rows": weights of
        fused MLPs some rows at a time.
    activation_checkpointing: the modules that recompute their activations, as `checkpoint_activations` takes them.
    activation_offload: whether the saved inputs of checkpoints are kept in CPU memory.
    data_replicate_size: a number of ranks or "auto".
    zero_stage: what is sharded over the data-parallel axis, 0 to 3; None: 3 with a plan, nothing without one.
    layout: the sizes of all axes as text, or None.
    sequence_parallel: whether the plan also shards activations along the sequence.
    pipeline_parallel_size: a number of ranks.
    pipeline_cuts: the names of the first module of each stage but the first; "auto" or an `AutoCuts`: weft chooses
        them; None: no pipeline.
    pipeline_schedule: a name in `weft.strategy.pipeline.SCHEDULES`, or a `Schedule`.
    num_micro_batches: micro-batches of a pipeline's step; None: the schedule's number, or twice the ranks.
    micro_batch_shares: the relative sizes of micro-batches instead of their number, or None.
    verify: whether layers that the plan shards by heads are compared with the unsharded module, as in
        `weft.strategy.Plan`; None: the plan's own setting, or "auto".
    pipeline_module: the name of the module that is cut; None: the one that contains the cuts. Fabric cuts the model
        that is set up.
    split_batch, micro_batch_weight: functions that split a batch, and that weight a micro-batch; None: by samples.
    """

    plan: Any
    check_batches: int
    check_batches_every: int
    fused_optimizers: bool
    empty_init: bool
    optimizer_in_backward: bool | str
    activation_checkpointing: Any
    activation_offload: bool
    data_replicate_size: int | str
    zero_stage: int | None
    layout: str | None
    sequence_parallel: bool
    pipeline_parallel_size: int = 1
    pipeline_cuts: Any = None
    pipeline_schedule: Any = "1f1b"
    num_micro_batches: int | None = None
    micro_batch_shares: Sequence[float] | None = None
    pipeline_module: str | None = None
    split_batch: Callable[[Any, int], Sequence[Any]] | None = None
    micro_batch_weight: Callable[[Any], float] | None = None
    verify: str | None = None

    @property
    def is_stock(self) -> bool:
        """Return whether sizes have the same meaning as in ModelParallelStrategy."""
        sizes_are = self.layout is None and self.data_replicate_size == 1 and self.pipeline_parallel_size == 1
        return self.plan is None and self.zero_stage is None and sizes_are and self.pipeline_cuts is None

    def validate(self, owner: str, data_parallel_size: int | str, tensor_parallel_size: int | str) -> Sizes:
        """Return the sizes of the axes; raise ValueError or TypeError for settings invalid on any number of devices."""
        for name in ("check_batches", "check_batches_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{owner} got {name}={value!r}; pass a whole number of batches, 0 for none.")
        if self.sequence_parallel is True and self.plan is None:
            raise ValueError(f"{owner} got sequence_parallel=True without a plan, which it changes; pass plan='auto'.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{owner} got {name}={getattr(self, name)!r}; pass True or False.")
        if not isinstance(self.optimizer_in_backward, bool) and self.optimizer_in_backward != "rows":
            raise ValueError(
                f"{owner} got optimizer_in_backward={self.optimizer_in_backward!r}; pass True, False or 'rows'."
            )
        if self.verify not in (None, "auto", "always", "never"):
            raise ValueError(f"{owner} got verify={self.verify!r}; pass 'auto', 'always' or 'never'.")
        if self.optimizer_in_backward == "rows" and self.plan is None:
            raise ValueError(
                f"{owner} got optimizer_in_backward='rows' without a plan, whose MLPs it is for; pass plan='auto'."
            )
        from weft.strategy.activation_checkpointing import check_checkpoint_spec

        check_checkpoint_spec(owner, self.activation_checkpointing)
        if self.activation_offload and self.activation_checkpointing == "none":
            raise ValueError(
                f"{owner} got activation_offload=True without checkpoints, whose inputs are what is offloaded; "
                "pass activation_checkpointing='full' or 'selective', too."
            )
        if self.zero_stage is not None and (isinstance(self.zero_stage, bool) or self.zero_stage not in ZERO_STAGES):
            raise ValueError(
                f"{owner} got zero_stage={self.zero_stage!r}; pass 0 (all replicated), 1 (optimizer states cut), "
                "2 (gradients, too) or 3 (parameters, too)."
            )
        if self.zero_stage == 1 and self.optimizer_in_backward:
            raise ValueError(
                f"{owner} got optimizer_in_backward={self.optimizer_in_backward!r} and zero_stage=1, which steps parts "
                "of parameters after the backward; pass one of the two."
            )
        sizes = self._sizes(owner, data_parallel_size, tensor_parallel_size)
        self._validate_pipeline(owner, sizes)
        return sizes

    def _validate_pipeline(self, owner: str, sizes: Sizes) -> None:
        if self.pipeline_cuts is None:
            if sizes.pipeline_parallel > 1:
                raise ValueError(
                    f"{owner} got {sizes.pipeline_parallel} pipeline-parallel ranks without stages; name the first "
                    "module of each stage but the first in pipeline_cuts."
                )
            if self.micro_batch_shares is not None:
                raise ValueError(
                    f"{owner} got micro_batch_shares without stages; name the first module of each stage but the first "
                    "in pipeline_cuts."
                )
            return
        self._validate_cuts(owner, sizes)
        self._validate_schedule(owner, sizes)

    def _validate_cuts(self, owner: str, sizes: Sizes) -> None:
        from weft.strategy.pipeline.auto_cuts import auto_of

        cuts = self.pipeline_cuts
        if (auto := auto_of(cuts)) is not None:
            self._validate_auto(owner, sizes, auto)
            return
        if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not all(isinstance(cut, str) for cut in cuts):
            raise TypeError(f"{owner} got pipeline_cuts={cuts!r}; pass a list of module names, or 'auto'.")
        one_each = isinstance(self.pipeline_schedule, str) and self.pipeline_schedule not in _SEVERAL_STAGES
        if cuts and sizes.pipeline_parallel == 1 and one_each:
            raise ValueError(
                f"{owner}: {len(cuts)} pipeline_cuts make {len(cuts) + 1} stages for one pipeline-parallel rank; "
                f"pass pipeline_parallel_size={len(cuts) + 1}, or a layout such as 'pp{len(cuts) + 1}'."
            )
        if (len(cuts) + 1) % sizes.pipeline_parallel != 0:
            raise ValueError(
                f"{owner}: {len(cuts)} pipeline_cuts make {len(cuts) + 1} stages for {sizes.pipeline_parallel} "
                "pipeline-parallel ranks; name cuts for as many stages, or for a multiple."
            )

    def _validate_auto(self, owner: str, sizes: Sizes, auto: AutoCuts) -> None:
        from weft.strategy.pipeline import SCHEDULES, Schedule
        from weft.strategy.pipeline.auto_cuts import num_stages_of

        if not isinstance(self.pipeline_schedule, Schedule) and self.pipeline_schedule not in SCHEDULES:
            return  # the next check raises
        try:
            num_stages = num_stages_of(auto, self.pipeline_schedule, sizes.pipeline_parallel)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        if num_stages == 1:
            raise ValueError(
                f"{owner} got pipeline_cuts='auto' for one pipeline-parallel rank; pass pipeline_parallel_size=2 or "
                "more, or a layout such as 'pp2'."
            )

    def _validate_schedule(self, owner: str, sizes: Sizes) -> None:
        if self.optimizer_in_backward or self.sequence_parallel is True:
            in_backward = f"optimizer_in_backward={self.optimizer_in_backward!r}"
            what = in_backward if self.optimizer_in_backward else "sequence_parallel=True"
            raise ValueError(f"{owner} got {what} with pipeline_cuts, which cannot be combined; leave one out.")
        from weft.strategy.pipeline import SCHEDULES, Schedule
        from weft.strategy.pipeline.arguments import shares_of

        schedule = self.pipeline_schedule
        if not isinstance(schedule, Schedule) and schedule not in SCHEDULES:
            raise ValueError(
                f"{owner} got pipeline_schedule={schedule!r}; pass one of {', '.join(SCHEDULES)}, or a Schedule."
            )
        if self.micro_batch_shares is not None and self.split_batch is not None:
            raise ValueError(
                f"{owner} got micro_batch_shares and split_batch, which cuts in sizes of its own; leave one out."
            )
        try:
            shares_of(schedule, self.num_micro_batches, self.micro_batch_shares, sizes.pipeline_parallel)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None

    def _sizes(self, owner: str, data_parallel_size: int | str, tensor_parallel_size: int | str) -> Sizes:
        from weft.strategy.layout import Sizes

        given = {
            "data_replicate_size": self.data_replicate_size,
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        try:
            if self.layout is None:
                return Sizes(*given.values())
            beside = [f"{name}={value!r}" for name, value in given.items() if value != _DEFAULT_SIZES[name]]
            if beside:
                raise ValueError(
                    f"got layout={self.layout!r}, which gives the sizes of all axes, and also {' and '.join(beside)}; "
                    "leave these out, or write them into the layout."
                )
            return Sizes.parse(self.layout)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None


def check_rows_without_replicas(owner: str, sizes: MeshSizes) -> None:
    """Raise ValueError for optimizer_in_backward="rows" with data-parallel ranks, which reduce full gradients."""
    num_data = sizes.data_replicate * sizes.data_parallel
    if num_data > 1:
        raise ValueError(
            f"{owner} got optimizer_in_backward='rows' with {num_data} data-parallel ranks, over which whole gradients "
            "are summed; pass True, or tensor-parallel ranks alone."
        )


def resolve_sizes(owner: str, sizes: Sizes, num_processes: int, num_nodes: int) -> MeshSizes:
    """Return the mesh's sizes for `num_processes` processes on each of `num_nodes` hosts.

    Raises:
        RuntimeError: the sizes do not fit. The stock strategy raises the same type, but after launching processes.
    """
    num_ranks = num_processes * num_nodes
    try:
        return sizes.resolve(num_ranks, num_processes)
    except ValueError as error:
        raise RuntimeError(
            f"{owner} has {num_ranks} process{'es' * (num_ranks != 1)} (devices x num_nodes; on CPU devices='auto' "
            f"means 1): {error}."
        ) from None
