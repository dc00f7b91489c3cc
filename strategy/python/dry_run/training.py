"""Trains a module for some steps on tensors without values, by the same code as a training with values."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft import _memory, memory
from weft.memory.source import reading_from
from weft.strategy.apply import parallelize
from weft.strategy.comparison import subject
from weft.strategy.comparison.sharded import JobMesh
from weft.strategy.context import carry_through_fsdp, parallelize_context
from weft.strategy.data_parallel import GradientReducer, ShardedStates, apply_fsdp
from weft.strategy.data_parallel.fully_sharded import mixed_precision_policy
from weft.strategy.data_parallel.reducer import average_gradient
from weft.strategy.deferred import attributes_of, deferred_init, is_deferred, materialize
from weft.strategy.dry_run.balanced_routing import balance_choices
from weft.strategy.dry_run.batches import batch_of, num_bytes_of, num_rows_of, with_rows
from weft.strategy.dry_run.counting_mode import CountingMode
from weft.strategy.dry_run.ledger import TensorLedger, local_of
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.stages import Stages, agreeing_peers
from weft.strategy.dry_run.step_clock import StageTimes, StepClock, StepTimes
from weft.strategy.dry_run.steps import Steps
from weft.strategy.dry_run.temporaries import Temporaries
from weft.strategy.dry_run.trace import OperatorTrace
from weft.strategy.modules.activation_checkpointing import checkpoint_activations
from weft.strategy.optimizers.fused_optimizers import fuse
from weft.strategy.optimizers.in_backward import StepInBackward
from weft.strategy.pipeline.fake_mode import DryRunMode
from weft.strategy.pipeline.micro_batches import map_tensors
from weft.strategy.pipeline.staged_model import find_staged
from weft.strategy.plan import Plan
from weft.strategy.verification.evidence import store_rehearsal

_PHASES = ("forward", "backward", "step")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The bytes of one rank.

    Attributes:
        num_parameters: of the full model; tied parameters count once.
        rank: the global rank.
        stages: the rank's stages of the pipeline; () without a pipeline.
        cuts: the names of the first module of each stage but the first.
        pipeline_module: the name of the divided submodule of a LightningModule; None: another module was divided.
        phases: at the peak of each phase, by category; "init": after the model is sharded.
        unmeasured: operators whose calls are too large for a measurement of their temporaries.
        num_rows: of the batch that was given, or that the model offers.
        times: of the last step; None: they were not asked for.
        stage_times: of the computations of a pipeline's last step; None: there is no pipeline, or no times.
        digest: of the modules, of all calls of operators and of `phases`; "": it was not asked for.
        batch_bytes: of the tensors of the batch.
        assumes_balanced_routing: whether the training chooses experts; the dry run chooses all equally often.
    """

    num_parameters: int
    rank: int
    stages: tuple[int, ...]
    cuts: tuple[str, ...]
    phases: dict[str, dict[str, int]]
    unmeasured: tuple[str, ...]
    num_rows: int
    times: StepTimes | None = None
    stage_times: StageTimes | None = None
    digest: str = ""
    batch_bytes: int = 0
    pipeline_module: str | None = None
    assumes_balanced_routing: bool = False


def predict(
    request: Request, rank: int, temporaries: Temporaries | None = None, clock: StepClock | None = None
) -> Prediction:
    """Return the prediction for a rank; this process must have no process group, and has none afterwards.

    Counts the memory of this process from now on.

    Args:
        temporaries: measured ones of earlier dry runs in this process.
        clock: predicts the times of a step; None: they are not predicted.

    Raises:
        ValueError: the arguments do not fit the model, or the training does something that needs values.
    """
    _memory.track()  # without a warning for tensors that exist
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=request.num_ranks)
    try:
        with agreeing_peers():
            return _DryRun(request, rank, temporaries or Temporaries(), clock).run()
    finally:
        dist.destroy_process_group()
        gc.collect()


class _DryRun:
    def __init__(self, request: Request, rank: int, temporaries: Temporaries, clock: StepClock | None) -> None:
        self._request = request
        self._rank = rank
        self._job = JobMesh(request.sizes, "cpu")
        self._fake_mode = DryRunMode()
        self._ledger = TensorLedger()
        self._clock = clock
        self._trace = OperatorTrace() if request.is_traced else None
        self._counting = CountingMode(self._ledger, self._fake_mode, temporaries, clock, self._trace)
        self._stages: Stages | None = None

    def run(self) -> Prediction:
        request = self._request
        model = self._build()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if self._trace is not None:
            self._trace.add_modules(model)
        given, is_for_forward = batch_of(model, request.batch)
        num_rows = num_rows_of(given)
        if request.num_rows is not None:
            given = with_rows(given, request.num_rows)
        loss_fn, _ = subject.loss_of(model, request.loss_fn, is_for_forward)
        plan = Plan(request.plan, sequence_parallel=request.sequence_parallel)
        if request.has_stages:
            self._stages = Stages(model, request, self._job, plan)
        self._shard_experts(model, plan)
        parallelize(
            model,
            self._job.mesh,
            plan,
            keeps_plain_on_one_rank=request.shards_parameters and not request.has_stages,
            keeps_deferred=True,
        )
        self._drop_values(model)
        balance_choices(model, self._counting)
        with self._counting.running(), reading_from(self._ledger):
            batch = self._counted_batch(given)
            self._ledger.hold(map(local_of, (*model.parameters(), *model.buffers())))
            self._train(model, batch, loss_fn)
        phases = self._phases()
        if self._trace is not None:
            self._trace.add_bytes(phases)
        return Prediction(
            num_parameters,
            self._rank,
            () if self._stages is None else self._stages.pipeline.stages,
            () if self._stages is None else self._stages.cuts,
            phases,
            tuple(sorted(self._counting.unmeasured)),
            num_rows,
            None if self._clock is None else self._clock.end_step(),
            None if self._clock is None or self._stages is None else self._stages.times(self._clock),
            "" if self._trace is None else self._trace.digest(),
            num_bytes_of(given),
            None if self._stages is None else self._stages.pipeline_module,
            self._counting.assumes_balanced_routing,
        )

    def _shard_experts(self, model: nn.Module, plan: Plan) -> None:
        if self._job.experts is not None and self._request.sizes.tensor_parallel > 1:
            store_rehearsal(model, plan.example)  # for the plan's verification, which calls the full model
        self._job.shard_experts(model, keeps_deferred=True)

    def _build(self) -> nn.Module:
        source = subject.resolve(self._request.module)
        torch.manual_seed(0)
        random.seed(0)
        with deferred_init():
            model = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
            if not isinstance(model, nn.Module):
                raise ValueError(
                    f"estimate: a {type(model).__name__} was given as the module; pass an nn.Module, a "
                    "LightningModule, or a callable without arguments that builds one."
                )
            configure: Any = getattr(model, "configure_model", None)
            if subject.is_lightning_module(model) and callable(configure):
                configure()
            return model.to(self._request.dtype).train()

    def _counted_batch(self, given: Any) -> Any:
        def without_values(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return self._counted_copy(tensor)
            with self._counting.paused():
                fake = self._fake_mode.from_tensor(tensor.detach().contiguous())
            return fake.to(self._request.dtype, copy=True)

        return map_tensors(without_values, given)

    def _counted_copy(self, tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        self._ledger.hold([copied])
        return copied

    def _drop_values(self, model: nn.Module) -> None:
        """Replace local tensors of parameters, and floating buffers, by tensors without values."""
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                parameter._local_tensor = self._without_values(parameter._local_tensor)
        new: dict[Tensor, Tensor] = {}  # also keeps the old tensors alive, whose hashes are their addresses
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or isinstance(tensor, DTensor) or not _loses_values(tensor):
                        continue
                    if tensor not in new:
                        new[tensor] = self._new_without_values(tensor)
                    table[name] = new[tensor]  # type: ignore[assignment]
        materialize(model)

    def _new_without_values(self, tensor: Tensor) -> Tensor:
        made = self._without_values(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(attributes_of(tensor))
        return made

    def _without_values(self, tensor: Tensor) -> Tensor:
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    # ---- training ------------------------------------------------------------------------------------------

    def _train(self, model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        request, stages = self._request, self._stages
        if self._job.context_group is not None:
            found = find_staged(model)
            skeleton = None if found is None else found[1].skeleton
            group, attention = self._job.context_group, request.context_attention
            parallelize_context(model, group, attention=attention, skeleton=skeleton)
        checkpoint_activations(model, request.activation_checkpointing)
        if request.shards_parameters:
            self._fully_shard(model, loss_fn)
            carry_through_fsdp(model)
        optimizer = request.make_optimizer(model) if stages is None else stages.make_optimizer()
        if request.fused_optimizers:
            states, weights = request.optimizer_state, request.master_weights
            fuse(optimizer, model, optimizer_state=states, master_weights=weights)
        groups = self._job.replica_groups
        averages = groups.group.size() > 1 and not request.shards_parameters
        steps_in_backward = request.optimizer_in_backward is not False
        reducer = None
        if averages and not steps_in_backward:
            reducer = GradientReducer(model, groups.group, experts=groups.experts)
        if request.zero_stage == 1 and self._job.data_parallel_size > 1:
            ShardedStates(optimizer, self._job.sharding_group, experts=self._job.expert_sharding_group)
        watch = memory.watch(model, optimizer)
        stepper = self._step_in_backward(model, optimizer, averages) if steps_in_backward else None
        if stages is not None:
            stages.average_and_step(reducer, stepper)
            if self._clock is not None:
                stages.time_by(self._clock)
        gc.collect()
        self._ledger.begin_phase("init", "other")
        steps = Steps(request, model, loss_fn, optimizer, self._counting, watch, reducer, stepper)
        for _ in range(request.num_steps):
            if self._clock is not None:
                self._clock.begin_step()
            if stages is None:
                steps.run(batch, self._clock)
            else:
                steps.run_in_stages(batch, stages)

    def _fully_shard(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        if self._stages is not None:
            self._stages.fully_shard()
            return
        request = self._request
        apply_fsdp(
            model,
            self._job.sharding_mesh,
            reshard_after_forward=request.zero_stage == 3,
            mp_policy=mixed_precision_policy(request.precision),
            entry_points=subject.entry_points_of(loss_fn),
            expert_mesh=self._job.expert_sharding_mesh,
        )

    def _step_in_backward(self, model: nn.Module, optimizer: torch.optim.Optimizer, averages: bool) -> StepInBackward:
        groups = self._job.replica_groups

        def average(parameter: Tensor) -> None:
            if averages:
                average_gradient(parameter, groups.of(parameter))

        return StepInBackward(model, optimizer, average, self._request.optimizer_in_backward == "rows")

    def _phases(self) -> dict[str, dict[str, int]]:
        """Return the largest peak of each kind of phase, without categories that are always empty."""
        largest: dict[str, dict[str, int]] = {}
        for name, _, usage in self._ledger.phases():
            if name in ("init", *_PHASES) and sum(usage.values()) > sum(largest.get(name, {}).values()):
                largest[name] = usage
        return {name: largest[name] for name in ("init", *_PHASES) if name in largest}


def _loses_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or is_deferred(tensor)
