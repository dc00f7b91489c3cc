"""Declares, documents and validates the options of weft's strategies; validation runs before processes are started.

The Trainer's strategy has Lightning's own options (`StockOptions`), then those of `Options`. Fabric's strategy has
`parallelize_fn` (`FabricOptions`) before these, and omits the options in `TRAINER_ONLY`.
`weft._plugin.signatures` makes the signatures and docstrings of both strategies from these classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.constants import default_pg_timeout
from torch.nn import Module

from weft._plugin.axis_options import has_ranks
from weft._plugin.compile_option import check_compile
from weft._plugin.context_options import check_context

if TYPE_CHECKING:
    from weft.strategy.pipeline import AutoCuts
    from weft.strategy.planning.layout import MeshSizes, Sizes

ZERO_STAGES = (0, 1, 2, 3)
# Under Fabric, arguments of `pipeline_step` replace two of these options, and the module that is set up is divided.
TRAINER_ONLY = frozenset({"pipeline_module", "split_batch", "micro_batch_weight", "resume"})
_DEFAULT_SIZES = {
    "data_replicate_size": 1,
    "data_parallel_size": "auto",
    "tensor_parallel_size": "auto",
    "pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
}
_FLAGS = (
    *("fused_optimizers", "empty_init", "activation_offload", "sequence_parallel", "join_gate_up"),
    *("allow_pickle", "async_save"),
)


@dataclass(frozen=True)
class FabricOptions:
    """The option that only Fabric's ModelParallelStrategy has.

    Attributes:
        parallelize_fn: as in ModelParallelStrategy, but optional: a function (model, device_mesh) -> model, called
            before the plan is applied.
    """

    parallelize_fn: Callable[[Module, Any], Module] | None = None


@dataclass(frozen=True)
class StockOptions:
    """The options of Lightning's ModelParallelStrategy.

    Attributes:
        data_parallel_size: the number of data-parallel ranks, over which `zero_stage` shards; "auto": the ranks that
            the other sizes leave. As in ModelParallelStrategy if neither a plan nor `zero_stage`, `layout`,
            `pipeline_cuts` or another axis is given.
        tensor_parallel_size: the number of tensor-parallel ranks; "auto": the ranks that the other sizes leave, at
            most those of one host. As in ModelParallelStrategy under the same condition.
        save_distributed_checkpoint: True: checkpoints are directories to which each rank writes its shards; False: one
            file, assembled on rank 0, that any Trainer loads.
        process_group_backend: as in ModelParallelStrategy, but None means "cpu:weft" on CPUs, on one host or several
            (alternative: "gloo"), and "cpu:weft,cuda:nccl" for a pipeline on CUDA devices.
        timeout: as in ModelParallelStrategy.
    """

    data_parallel_size: int | str = "auto"
    tensor_parallel_size: int | str = "auto"
    save_distributed_checkpoint: bool = True
    process_group_backend: str | None = None
    timeout: timedelta | None = default_pg_timeout


@dataclass(frozen=True)
class Options:
    """The options of weft's strategies beyond Lightning's own.

    Attributes:
        plan: a plan as in `weft.parallelize`, applied to the parameters that are not DTensors yet. With a plan, a
            LightningModule needs no `configure_model`; if there is one, it runs before the plan is applied. None: as in
            ModelParallelStrategy, the user's code does all the sharding.
        check_batches: the number of first batches of each loop (training, validation, ...) that are compared between
            the ranks of a tensor-parallel group and between the stages of a pipeline. The first batch of each training
            epoch (under Fabric: of each loop over a loader) and the lengths of loaders are compared as well, unless
            check_batches and check_batches_every are 0.
        check_batches_every: N, to compare every N-th batch of each loop as well; 0: no others.
        fused_optimizers: with a plan, make Adam, AdamW, SGD and, on CPUs, Adagrad use fused kernels without
            temporaries, unless `foreach` or `fused` was set; changes are logged. False: change no optimizer.
        optimizer_state: "float32", "bfloat16" or "int8": the format of the states of Adam, AdamW and SGD with momentum,
            with 4, 2 or 1 bytes for each element; see `weft.strategy.fuse`. Other optimizers raise ValueError if it is
            not "float32".
        master_weights: "float32"; "split", with precision "bf16-mixed" or "bf16-true": weights are bfloat16 and their
            other 16 bits are a state of the optimizer, so that steps are those of float32 weights; "split8": 8 of these
            bits are kept.
        offload: {"optimizer": "cpu"} or {"optimizer": "disk:/path"}: keep the states of Adam, AdamW, Adagrad and SGD
            with momentum in CPU memory, or in memory-mapped files in this directory, and step CUDA parameters on the
            CPU; see `weft.strategy.offload_states`. "parameters": "cpu" in the dict: with zero_stage 3 or 2, keep the
            shards of parameters, gradients and states in CPU memory; FSDP2 copies those of a unit to the device when it
            gathers it. None: everything is in the memory of the device.
        empty_init: with a plan, parameters created in `configure_model` or inside `init_module(empty_init=True)` are
            deferred: applying the plan materializes only the shards of each rank, with the values of an unsharded
            model. False: as in ModelParallelStrategy, where every rank first builds the full model.
        optimizer_in_backward: step each parameter as soon as its gradient is complete, and free the gradient, so that
            one gradient is in memory at a time; under Fabric, call `step()` after each backward. Supports one
            optimizer, Adam, AdamW or SGD; clipping by norm runs the backward twice; features that need all gradients
            at once raise ValueError. "rows": also step the weights of fused MLPs some rows at a time; not with data
            parallelism or pipelines.
        activation_checkpointing: "none"; "full": each repeated block saves only its inputs for the backward, which
            recomputes the forward; "selective": each block also saves the results of matrix products, attention and
            communication; "full:8" or "selective:8": so do the first eight blocks, in a pipeline of each rank; or a
            pattern of module names, a list of them, or a dict from pattern to "full" or "selective".
        activation_offload: keep the inputs of checkpointed modules in CPU memory until the backward; only on CUDA
            devices.
        compile: "blocks": each repeated block is compiled by torch.compile, after it is sharded and checkpointed; equal
            blocks share their code. A dict: the same with arguments of torch.compile, such as {"mode": "max-autotune"}.
            Without context-parallel ranks and split backwards. None: nothing is compiled.
        data_replicate_size: the number of replicas of the model, each sharded over the other axes; "auto": the ranks
            that the other sizes leave.
        zero_stage: what is sharded over the data-parallel axis. 3: parameters, gradients and optimizer states (FSDP2,
            which frees the gathered parameters of each unit after its forward); 2: the same, but the gathered
            parameters are freed after the unit's backward; 1: only the optimizer states; 0: nothing. None: 3 with a
            plan, `pipeline_cuts`, context- or expert-parallel ranks; without these, the user's code does all the
            sharding.
        layout: all sizes at once, such as "dp2,tp2" or "rep2,dp4,tp8"; omitted axes have one rank. "auto", under the
            Trainer: weft chooses replicas, data-parallel and tensor-parallel ranks at the start of a run, by dry runs
            on rank 0 (see `weft tune`), for which the script must call the Trainer under `if __name__ == "__main__"`.
        memory_limit: with layout="auto", the most bytes of a device, such as "72GB"; None: nine tenths of a GPU's
            memory, or an equal share of the host's for CPU ranks.
        sequence_parallel: with a plan, also shard the tokens over the tensor-parallel ranks between the layers that are
            sharded by features: in norms, residual sums and dropout, and in their saved activations. With
            `pipeline_cuts`, between the blocks of each stage.
        context_parallel_size: the number of ranks that get the same batch and compute different tokens of each
            sequence. Gradients are averaged, and `zero_stage` shards, over these and the data-parallel ranks together.
            In `layout`, it is the size "cp", as in "dp2,cp2,tp2". Without pipelines and `sequence_parallel`.
        context_attention: how attention computes with sequences that context-parallel ranks shard. "ring": keys and
            values travel around the ranks; "ulysses": an all-to-all gives each rank some heads for all tokens, and the
            number of ranks must divide the number of heads; "ring_ulysses": as "ulysses" within groups of as many ranks
            as divide a layer's heads and key/value heads, and as "ring" between the groups.
        expert_parallel_size: the number of ranks that shard the experts of a mixture of experts: a part of the data-
            and context-parallel ranks, each of which has tokens of its own. `zero_stage` shards experts over the ranks
            that remain. In `layout`, it is the size "ep", as in "dp8,ep4".
        pipeline_cuts: a list of names, the first module of each stage after stage 0, in the divided module or in the
            LightningModule; or "auto", see `weft.strategy.pipeline.AutoCuts`. The Trainer runs `training_step` and the
            other steps once for each micro-batch (code before the call of the divided module on every stage, code after
            it on the last stage), and combines logs and results; under Fabric, `pipeline_step` trains the model. None:
            no pipeline.
        pipeline_module: the name of the divided module, such as "model"; all modules outside of it are on the last
            stage. "": the LightningModule itself, whose steps call self(...). None: the child that contains the cuts,
            else "".
        pipeline_parallel_size: the number of ranks of a pipeline, each with one stage or, with more cuts, several. In
            `layout`, it is the size "pp", as in "pp2,dp2,tp2".
        pipeline_schedule: "1f1b", "gpipe", "zero_bubble", "interleaved", "looped_bfs", "naive"; "zbv", "dualpipev",
            "v_half", "v_min", which have two stages on each rank; or a `weft.strategy.pipeline.Schedule`.
        num_micro_batches: micro-batches per batch; None: the number of a given `Schedule`, else twice the number of the
            pipeline's ranks.
        micro_batch_shares: the relative sizes of micro-batches instead of their number, such as [1, 2, 1]; None: as
            even as possible.
        split_batch: a function that splits a batch into a number of micro-batches; None: along dim 0 of the tensors.
        micro_batch_weight: a function that returns the weight of a micro-batch in the loss and in logged values; None:
            its number of samples.
        verify: "auto": layers that "auto", "huggingface" or the style `attention` would shard by heads are first
            compared with the unsharded module, and their activations are gathered if results differ; a difference under
            explicit column and row rules is a warning. "always": this difference, or a layer that cannot be compared,
            raises ValueError. "never": no comparison. None: the plan's setting. See `weft.strategy.Plan`.
        join_gate_up: keep the gate and up weights of each fused gated MLP in one storage, so that in eager mode both
            projections are one matrix product; see `weft.strategy.join_gate_up`. Without data-parallel ranks that
            shard parameters.
        pretrained: with a plan, a file or directory of pretrained weights, of which each rank reads its shards when
            the plan is applied; see `weft.load_pretrained`. The names of the files may be those of a module inside the
            LightningModule. None: the model has the values that its code gives it.
        allow_pickle: True: also unpickle the Python objects in a checkpoint directory, those of weft 0.1 and Lightning
            included, which can run any code in the checkpoint. False: a directory that has such objects raises
            ValueError, which names them; other directories load.
        async_save: during `fit`, and under Fabric, write checkpoint directories in the background: training stops only
            while each rank copies its shards into CPU memory, which is kept for the next save. One save is written at
            a time. An error is raised by the next save in the background, by loading, or at the end of `fit`. False: a
            save returns when the checkpoint is on the disk.
        affinity: "auto": until the run ends, each rank of a host runs on its share of the processors that all of them
            may use; see `weft.strategy.spread_ranks`. None: where the kernel puts it.
        resume: "auto": the first `fit` of a Trainer goes on from the newest complete checkpoint directory in the
            `dirpath` of its callbacks (ModelCheckpoint, Preemption), as `newest_checkpoint` finds it, so that a job
            that is started again needs no `ckpt_path`. A `ckpt_path` is used if there is none, or if it is a directory
            of a later step. None: only a `ckpt_path` is loaded.
    """

    plan: Any = None
    check_batches: int = 2
    check_batches_every: int = 0
    fused_optimizers: bool = True
    optimizer_state: Literal["float32", "bfloat16", "int8"] = "float32"
    master_weights: Literal["float32", "split", "split8"] = "float32"
    offload: Mapping[str, str] | None = None
    empty_init: bool = True
    optimizer_in_backward: bool | Literal["rows"] = False
    activation_checkpointing: Any = "none"
    activation_offload: bool = False
    compile: Literal["blocks"] | Mapping[str, Any] | None = None
    data_replicate_size: int | str = 1
    zero_stage: int | None = None
    layout: str | None = None
    memory_limit: int | str | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    context_attention: Literal["ring", "ulysses", "ring_ulysses"] = "ring"
    expert_parallel_size: int = 1
    pipeline_cuts: Any = None
    pipeline_module: str | None = None
    pipeline_parallel_size: int = 1
    pipeline_schedule: Any = "1f1b"
    num_micro_batches: int | None = None
    micro_batch_shares: Sequence[float] | None = None
    split_batch: Callable[[Any, int], Sequence[Any]] | None = None
    micro_batch_weight: Callable[[Any], float] | None = None
    verify: Literal["auto", "always", "never"] | None = None
    join_gate_up: bool = False
    pretrained: str | os.PathLike[str] | None = None
    allow_pickle: bool = False
    async_save: bool = False
    affinity: Literal["auto"] | None = None
    resume: Literal["auto"] | None = None

    @property
    def is_stock(self) -> bool:
        """Return whether the sizes of axes have the same meaning as in ModelParallelStrategy."""
        sizes = (
            *(self.data_replicate_size, self.pipeline_parallel_size),
            *(self.context_parallel_size, self.expert_parallel_size),
        )
        are_sizes_stock = self.layout is None and all(size == 1 for size in sizes)
        return self.plan is None and self.zero_stage is None and are_sizes_stock and self.pipeline_cuts is None

    @property
    def chooses_layout(self) -> bool:
        """Return whether weft chooses the sizes of the axes."""
        return self.layout == "auto"

    @property
    def needs_plan(self) -> bool:
        """Whether other options require a plan; if `plan` is None, a plan without rules is then applied."""
        return self.zero_stage is not None or self.has_stages or self.has_context or self.has_experts

    @property
    def has_low_precision(self) -> bool:
        """Whether optimizers have states, or weights, in another format than torch's."""
        return (self.optimizer_state, self.master_weights) != ("float32", "float32")

    @property
    def has_stages(self) -> bool:
        """Whether the model is divided into the stages of a pipeline."""
        return self.pipeline_cuts is not None

    @property
    def has_context(self) -> bool:
        """Whether there are several context-parallel ranks."""
        return has_ranks(self, "context_parallel")

    @property
    def has_experts(self) -> bool:
        """Whether there are several expert-parallel ranks."""
        return has_ranks(self, "expert_parallel")

    @property
    def offloads_parameters(self) -> bool:
        """Return whether parameters are in CPU memory while no unit needs them."""
        return isinstance(self.offload, Mapping) and "parameters" in self.offload

    @property
    def sharding_stage(self) -> int:
        """The ZeRO stage: `zero_stage`, or 3 if that is None."""
        return 3 if self.zero_stage is None else self.zero_stage

    def validate(self, owner: str, data_parallel_size: int | str, tensor_parallel_size: int | str) -> Sizes:
        """Return the sizes of the axes; raise ValueError or TypeError for settings invalid on any number of devices."""
        for name in ("check_batches", "check_batches_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{owner} got {name}={value!r}; pass a whole number of batches, 0 for none.")
        if self.sequence_parallel is True and self.plan is None:
            raise ValueError(f"{owner} got sequence_parallel=True without a plan, which it needs; pass plan='auto'.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{owner} got {name}={getattr(self, name)!r}; pass True or False.")
        if not isinstance(self.optimizer_in_backward, bool) and self.optimizer_in_backward != "rows":
            raise ValueError(
                f"{owner} got optimizer_in_backward={self.optimizer_in_backward!r}; pass True, False or 'rows'."
            )
        self._validate_states(owner)
        if self.offload is not None:
            self._validate_offload(owner)
        if self.verify not in (None, "auto", "always", "never"):
            raise ValueError(f"{owner} got verify={self.verify!r}; pass 'auto', 'always' or 'never'.")
        if self.optimizer_in_backward == "rows" and self.plan is None:
            raise ValueError(
                f"{owner} got optimizer_in_backward='rows' without a plan that fuses MLPs; pass plan='auto'."
            )
        if self.affinity not in (None, "auto"):
            raise ValueError(f"{owner} got affinity={self.affinity!r}; pass 'auto', or None.")
        if self.resume not in (None, "auto"):
            raise ValueError(f"{owner} got resume={self.resume!r}; pass 'auto', or None and a ckpt_path to fit.")
        for name, is_set in (("async_save=True", self.async_save), ("resume='auto'", self.resume is not None)):
            if is_set and self.plan is None and not self.needs_plan:
                raise ValueError(
                    f"{owner} got {name} without a plan, with which Lightning writes the checkpoints; pass plan='auto'."
                )
        if self.join_gate_up and self.plan is None:
            raise ValueError(f"{owner} got join_gate_up=True without a plan that fuses MLPs; pass plan='auto'.")
        if self.pretrained is not None:
            self._validate_pretrained(owner)
        from weft.strategy.modules.activation_checkpointing import check_checkpoint_spec

        check_checkpoint_spec(owner, self.activation_checkpointing)
        if self.activation_offload and self.activation_checkpointing == "none":
            raise ValueError(
                f"{owner} got activation_offload=True without activation checkpointing, and only inputs of "
                "checkpointed modules are offloaded; pass activation_checkpointing='full' or 'selective', too."
            )
        if self.zero_stage is not None and (isinstance(self.zero_stage, bool) or self.zero_stage not in ZERO_STAGES):
            raise ValueError(
                f"{owner} got zero_stage={self.zero_stage!r}; pass 0 (all replicated), 1 (optimizer states sharded), "
                "2 (gradients, too) or 3 (parameters, too)."
            )
        if self.zero_stage == 1 and self.optimizer_in_backward:
            raise ValueError(
                f"{owner} got optimizer_in_backward={self.optimizer_in_backward!r} and zero_stage=1, which steps "
                "shards of parameters after the backward; pass one of the two."
            )
        from weft._plugin.auto_layout import check_options

        check_options(owner, self)
        sizes = self._sizes(owner, data_parallel_size, tensor_parallel_size)
        self._validate_pipeline(owner, sizes)
        check_context(owner, self, sizes)
        check_compile(owner, self, sizes)
        return sizes

    def _validate_states(self, owner: str) -> None:
        from weft.strategy.optimizers.state_format import StateFormat

        try:
            is_usual = StateFormat(self.optimizer_state, self.master_weights).is_usual
        except ValueError as error:
            raise ValueError(f"{owner} {error}") from None
        if is_usual:
            return
        given = f"optimizer_state={self.optimizer_state!r} and master_weights={self.master_weights!r}"
        if not self.fused_optimizers:
            raise ValueError(f"{owner} got {given} with fused_optimizers=False; pass fused_optimizers=True.")
        if self.zero_stage == 1:
            raise ValueError(
                f"{owner} got {given} and zero_stage=1, which shards states in other units than blocks; pass "
                "zero_stage=0, 2 or 3."
            )
        if self.join_gate_up and self.master_weights != "float32":
            raise ValueError(
                f"{owner} got master_weights={self.master_weights!r} and join_gate_up=True, whose joined weights "
                "cannot be split; leave one out."
            )

    def _validate_offload(self, owner: str) -> None:
        from weft.strategy.optimizers.offload import directory_of

        given = f"{owner} got offload={self.offload!r}"
        if (
            not isinstance(self.offload, Mapping)
            or not self.offload
            or self.offload.keys() - {"optimizer", "parameters"}
        ):
            raise ValueError(
                f"{given}; pass a dict with the keys 'optimizer' or 'parameters', as in offload={{'optimizer': 'cpu'}} "
                "or offload={'optimizer': 'disk:/scratch', 'parameters': 'cpu'}."
            )
        if "optimizer" in self.offload:
            try:
                directory_of(self.offload["optimizer"])
            except ValueError as error:
                raise ValueError(f"{given}: {error}") from None
        if self.offloads_parameters:
            self._validate_parameter_offload(given)
        if self.zero_stage == 1:
            raise ValueError(
                f"{owner} got offload={self.offload!r} and zero_stage=1, which shards states in memory; pass "
                "zero_stage=0, 2 or 3."
            )

    def _validate_parameter_offload(self, given: str) -> None:
        assert self.offload is not None
        if self.offload["parameters"] != "cpu":
            raise ValueError(f"{given}, and parameters can be in CPU memory only; pass 'cpu'.")
        if self.plan is None and not self.needs_plan:
            raise ValueError(f"{given} without a plan, with which weft shards; pass plan='auto'.")
        if self.sharding_stage < 2:
            raise ValueError(
                f"{given} and zero_stage={self.zero_stage!r}, and FSDP2 offloads parameters; pass zero_stage=3."
            )
        if self.has_stages:
            raise ValueError(
                f"{given} and pipeline_cuts, whose stages keep their parameters on the device; leave one of them out."
            )

    def _validate_pretrained(self, owner: str) -> None:
        if not isinstance(self.pretrained, (str, os.PathLike)):
            raise TypeError(f"{owner} got pretrained={self.pretrained!r}; pass the path of a file or a directory.")
        if self.plan is None and not self.needs_plan:
            raise ValueError(
                f"{owner} got pretrained={os.fspath(self.pretrained)!r} without a plan, which shards what is read; "
                "pass plan='auto'."
            )
        from weft.strategy.pretrained.files import find_file

        try:
            find_file(self.pretrained)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{owner}: {error}") from None

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
        from weft.strategy.pipeline import SCHEDULES, AutoCuts, Schedule
        from weft.strategy.pipeline.auto_cuts import auto_of, num_stages_of

        schedule = self.pipeline_schedule
        cuts = self.pipeline_cuts
        if (auto := auto_of(cuts)) is not None:
            self._validate_auto(owner, sizes, auto)
            return
        if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not all(isinstance(cut, str) for cut in cuts):
            raise TypeError(f"{owner} got pipeline_cuts={cuts!r}; pass a list of module names, or 'auto'.")
        is_named = isinstance(schedule, str) and schedule in SCHEDULES  # else, _validate_schedule checks it
        one_per_rank = is_named and num_stages_of(AutoCuts(), schedule, 1) == 1
        if cuts and sizes.pipeline_parallel == 1 and one_per_rank:
            raise ValueError(
                f"{owner}: {len(cuts)} pipeline_cuts make {len(cuts) + 1} stages for one pipeline-parallel rank; "
                f"pass pipeline_parallel_size={len(cuts) + 1}, or a layout such as 'pp{len(cuts) + 1}'."
            )
        if (len(cuts) + 1) % sizes.pipeline_parallel != 0:
            raise ValueError(
                f"{owner}: {len(cuts)} pipeline_cuts make {len(cuts) + 1} stages for {sizes.pipeline_parallel} "
                "pipeline-parallel ranks; name cuts for as many stages, or for a multiple."
            )
        if is_named:
            try:  # raises for a number of stages per rank that the schedule does not support
                Schedule.generate(schedule, sizes.pipeline_parallel, 1, (len(cuts) + 1) // sizes.pipeline_parallel)
            except ValueError as error:
                raise ValueError(f"{owner}: {error}.") from None

    def _validate_auto(self, owner: str, sizes: Sizes, auto: AutoCuts) -> None:
        from weft.strategy.pipeline import SCHEDULES, Schedule
        from weft.strategy.pipeline.auto_cuts import num_stages_of

        if not isinstance(self.pipeline_schedule, Schedule) and self.pipeline_schedule not in SCHEDULES:
            return  # _validate_schedule raises
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
        if self.optimizer_in_backward == "rows":
            raise ValueError(
                f"{owner} got optimizer_in_backward='rows' with pipeline_cuts, whose stages accumulate full gradients "
                "over micro-batches; pass True."
            )
        from weft.strategy.pipeline import SCHEDULES, Schedule
        from weft.strategy.pipeline.arguments import shares_of

        schedule = self.pipeline_schedule
        if not isinstance(schedule, Schedule) and schedule not in SCHEDULES:
            raise ValueError(
                f"{owner} got pipeline_schedule={schedule!r}; pass one of {', '.join(SCHEDULES)}, or a Schedule."
            )
        if self.micro_batch_shares is not None and self.split_batch is not None:
            raise ValueError(
                f"{owner} got micro_batch_shares and split_batch, which sets the sizes itself; leave one out."
            )
        try:
            shares_of(schedule, self.num_micro_batches, self.micro_batch_shares, sizes.pipeline_parallel)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None

    def _sizes(self, owner: str, data_parallel_size: int | str, tensor_parallel_size: int | str) -> Sizes:
        from weft.strategy.planning.layout import Sizes

        given: dict[str, Any] = {
            "data_replicate_size": self.data_replicate_size,
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "expert_parallel_size": self.expert_parallel_size,
        }
        try:
            if self.layout is None:
                return Sizes(*given.values())
            further = [f"{name}={value!r}" for name, value in given.items() if value != _DEFAULT_SIZES[name]]
            if further:
                raise ValueError(
                    f"got layout={self.layout!r}, which gives the sizes of all axes, and also {' and '.join(further)}; "
                    "leave these out, or write them into the layout."
                )
            return Sizes() if self.chooses_layout else Sizes.parse(self.layout)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None


def check_rows_on_one_data_rank(owner: str, sizes: MeshSizes) -> None:
    """Raise ValueError for optimizer_in_backward="rows" with several ranks that average full gradients."""
    num_data = sizes.data_replicate * sizes.data_parallel
    for kind, size in (("data-parallel", num_data), ("context-parallel", sizes.context_parallel)):
        if size > 1:
            raise ValueError(
                f"{owner} got optimizer_in_backward='rows' with {size} {kind} ranks, over which full gradients are "
                f"averaged; pass True, or a layout without {kind} ranks."
            )


def check_offloaded_parameters(owner: str, options: Options, sizes: MeshSizes) -> None:
    """Raise ValueError for offloaded parameters on one data rank, which shards nothing by FSDP2."""
    if options.offloads_parameters and sizes.data_parallel * sizes.context_parallel == 1:
        raise ValueError(
            f"{owner} got offload={options.offload!r} with 1 data-parallel rank, and FSDP2 offloads parameters that it "
            "shards over several; pass offload={'optimizer': 'cpu'}, or a layout with data-parallel ranks, as 'dp2'."
        )


def check_joined_weights(owner: str, options: Options, sizes: MeshSizes) -> None:
    """Raise ValueError for join_gate_up with data ranks that shard parameters: each gathers into new memory."""
    num_shards = sizes.data_parallel * sizes.context_parallel
    if options.join_gate_up and num_shards > 1 and options.sharding_stage >= 2:
        kind = "data-parallel" if sizes.context_parallel == 1 else "data- and context-parallel"
        raise ValueError(
            f"{owner} got join_gate_up=True with {num_shards} {kind} ranks, which gather each weight into memory of "
            "its own; pass zero_stage=1 or 0, or join_gate_up=False."
        )


def resolve_sizes(owner: str, sizes: Sizes, num_processes: int, num_nodes: int) -> MeshSizes:
    """Return the mesh's sizes for `num_processes` processes on each of `num_nodes` hosts.

    Raises:
        RuntimeError: the sizes do not fit the number of processes. ModelParallelStrategy raises the same type, but only
            after processes are launched.
    """
    num_ranks = num_processes * num_nodes
    try:
        return sizes.resolve(num_ranks, num_processes)
    except ValueError as error:
        raise RuntimeError(
            f"{owner} has {num_ranks} process{'es' * (num_ranks != 1)} (devices x num_nodes; on CPU devices='auto' "
            f"means 1): {error}."
        ) from None
