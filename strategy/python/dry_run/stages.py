"""The stages of the rank that a dry run plays: a real pipeline, whose other ranks do not exist.

The rank divides the model, records the forward and runs its own actions of the schedule by the code of a training.
Three things differ:

- Where ranks compare arguments, the other ranks have those of this rank (`agreeing_peers`).
- The C++ code of a receive allocates tensors of the recorded shapes, and torch's fake process group completes it at
  once. `messages.py` decides how long the tensors of a send are in flight.
- Automatic cuts are chosen by this rank, as the first rank would choose them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.strategy.comparison import subject
from weft.strategy.comparison.sharded import JobMesh
from weft.strategy.data_parallel import GradientReducer
from weft.strategy.data_parallel.fully_sharded import mixed_precision_policy
from weft.strategy.dry_run.request import Request
from weft.strategy.dry_run.step_clock import StageTimes, StepClock
from weft.strategy.optimizers.in_backward import StepInBackward
from weft.strategy.pipeline.arguments import shares_of
from weft.strategy.pipeline.auto_cuts import AutoCuts, call_with, cuts_on_first_rank, num_stages_of
from weft.strategy.pipeline.last_stage_modules import LastStageModules, check_not_shared
from weft.strategy.pipeline.micro_batches import map_tensors
from weft.strategy.pipeline.pipeline import Pipeline
from weft.strategy.pipeline.target import find_target, has_own_forward
from weft.strategy.plan import Plan
from weft.strategy.sharding.remote_layers import placeholder_parameters
from weft.strategy.verification.evidence import store_rehearsal

_OWNER = "estimate:"  # in the errors of `find_target`
_CPU = torch.device("cpu")


class Stages:
    """Divides a model in place, and runs the steps of this rank's stages.

    The divided module is the model or, for a LightningModule, the module in it that the Trainer would divide.

    Args:
        model: with deferred parameters, before `parallelize`.
        request: the training.
        job: the mesh, with the axis pipeline_parallel.
        plan: that of `request`.

    Raises:
        ValueError: the cuts, or the other options of the pipeline, do not fit the model.
    """

    def __init__(self, model: nn.Module, request: Request, job: JobMesh, plan: Plan) -> None:
        self._model, self._request, self._job = model, request, job
        num_ranks, schedule = request.sizes.pipeline_parallel, request.schedule
        cuts, auto = request.cuts, AutoCuts()
        name = ""
        self.pipeline_module: str | None = None  # the name of the divided submodule of a LightningModule
        if subject.is_lightning_module(model):
            num_stages = num_stages_of(auto, schedule, num_ranks) if cuts is None else 0
            target = find_target(_OWNER, model, request.pipeline_module, cuts, num_stages)
            name, cuts = target.name, target.cuts
            self.pipeline_module = name
            check_not_shared(model, name)
        elif request.pipeline_module is not None:
            raise ValueError(
                f"estimate: pipeline_module is {request.pipeline_module!r} for a {type(model).__name__}, which has no "
                "training_step and is itself divided; leave it out."
            )
        inner, layer_stages = model.get_submodule(name), None
        if cuts is None:
            choice = cuts_on_first_rank(
                inner,
                auto,
                schedule,
                num_ranks=num_ranks,
                num_micro_batches=len(shares_of(schedule, request.num_micro_batches, None, num_ranks)),
                device=_CPU,
                forward=self._example_call(inner),
                parameter_shards=request.num_shards,
            )
            cuts, layer_stages = choice.cuts, choice.layer_stages
        if request.sizes.tensor_parallel > 1:  # for the plan's verification, which needs all layers
            store_rehearsal(model, plan.example)
        self.cuts = tuple(cuts)
        self.pipeline = Pipeline(
            inner,
            job.mesh,
            self.cuts,
            schedule=schedule,
            num_micro_batches=request.num_micro_batches,
            layer_stages=layer_stages,
            device=_CPU,
            verify=plan.verify,
        )
        self._beside = LastStageModules(model, name, self.pipeline.has_last_stage)
        self._reducer: GradientReducer | None = None
        self._stepper: StepInBackward | None = None

    def _example_call(self, inner: nn.Module) -> Callable[[], Any] | None:
        """Return what runs a forward on the `example_input_array`, as under the Trainer; None: there is no example."""
        model, request = self._model, self._request
        example = getattr(model, "example_input_array", None)
        if example is None or not subject.is_lightning_module(model):
            return None
        function = model if has_own_forward(model) else inner
        inputs = map_tensors(lambda each: each.to(request.dtype) if each.is_floating_point() else each, example)

        def call() -> Any:
            with request.computing():
                return call_with(function, inputs)

        return call

    def fully_shard(self) -> None:
        """Shard the parameters of the stages by FSDP2; call it after `parallelize`."""
        policy = mixed_precision_policy(self._request.precision)
        self.pipeline.fully_shard(self._job.sharding_mesh, mp_policy=policy, expert_mesh=self._job.expert_sharding_mesh)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's parameters; while it is made, there are placeholders for the others."""
        with placeholder_parameters(self._model, _CPU) as placeholders:
            optimizer = self._request.make_optimizer(self._model)
        ids = set(map(id, placeholders))
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
        return optimizer

    def average_and_step(self, reducer: GradientReducer | None, stepper: StepInBackward | None) -> None:
        """Set what averages the gradients of replicas after each step, and what steps the optimizer inside of it."""
        outside = list(self._beside.parameters.values())
        if self._request.shards_parameters and outside:  # FSDP2 shards the stages alone
            reducer = GradientReducer(nn.ParameterList(outside), self._job.gradient_group)
        self._reducer, self._stepper = reducer, stepper

    def time_by(self, clock: StepClock) -> None:
        """Time the computations of later steps by the clock of the dry run."""
        self.pipeline.time_by(lambda: _Marks(clock))

    def times(self, clock: StepClock) -> StageTimes:
        """Return the times of the last step, after `time_by`."""
        spans = self.pipeline.trace
        # A small batch is split into fewer micro-batches than the pipeline has.
        schedule = self.pipeline.schedule(len({span.action.micro_batch for span in spans}))
        seconds = {str(span.action): span.end - span.start for span in spans}
        return StageTimes(str(schedule), seconds, clock.message_bytes)

    def step(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        """Run the schedule, forwards and backwards, and average the gradients."""
        with contextlib.nullcontext() if self._reducer is None else self._reducer.paused():
            self.pipeline.step(batch, lambda micro_batch: loss_fn(self._model, micro_batch), stepper=self._stepper)
        if self._reducer is not None:
            self._reducer.finish()
        if self._stepper is not None:
            self._stepper.step_gradients()  # those of the modules beside the divided one


class _Marks:
    """The clock of a dry run, as a pipeline reads it: a mark is the seconds since the step began."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock.now

    def seconds(self, mark: float) -> float:
        return mark

    def begun(self) -> float:
        return 0.0


@contextlib.contextmanager
def agreeing_peers() -> Iterator[None]:
    """Inside, the other ranks of each group have the same objects as this rank, where ranks compare objects."""
    original = dist.all_gather_object

    def all_gather_object(object_list: list[Any], obj: Any, *_args: Any, **_kwargs: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    dist.all_gather_object = all_gather_object
    try:
        yield
    finally:
        dist.all_gather_object = original
