"""Pipeline: training and evaluation steps of a model whose layers are split into stages."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from weft.strategy._plan import Action, Schedule, Span
from weft.strategy.data_parallel import clip_gradients_by_norm
from weft.strategy.pipeline.arguments import check_equal_arguments, pipeline_group, shares_of
from weft.strategy.pipeline.auto_cuts import AutoCuts, agree_on_cuts, auto_of
from weft.strategy.pipeline.failures import Failures
from weft.strategy.pipeline.generation import GenerateCall, Generation
from weft.strategy.pipeline.links import link_stages, peers_of
from weft.strategy.pipeline.micro_batches import batch_size_of, signature, split_batch
from weft.strategy.pipeline.recording import Recording
from weft.strategy.pipeline.runner import MAX_STAGES, Runner, Work
from weft.strategy.pipeline.sequence_lengths import SequenceLengths, check_tokens_stay
from weft.strategy.pipeline.sharded_stages import ShardedStages
from weft.strategy.pipeline.staged_model import StagedModel, staged_model_of
from weft.strategy.pipeline.stages import Layers, check_not_compiled, find_layers
from weft.strategy.pipeline.step_clock import StepClock
from weft.strategy.pipeline.steps_in_backward import Stepper, check_can_step
from weft.strategy.pipeline.tied import TiedGradients, check_equal_shards, secondary_copies
from weft.strategy.pipeline.verify_cuts import verify_cuts
from weft.strategy.sharding.shards import TENSOR_PARALLEL
from weft.strategy.verification.evidence import drop_rehearsal, store_rehearsal

_log = logging.getLogger(__name__)
_MAX_RECORDINGS_PER_KEY = 16  # one for each path of the code between layers
_MAX_KEYS = 256  # of recordings; batches of varying lengths have many

Step = Callable[[Any], Any]
Split = Callable[[Any, int], Sequence[Any]]
LossWeight = Callable[[Any], float]


class Pipeline:
    """Removes the layers of other ranks' stages from a model, in place, and runs steps over all stages.

    Args:
        model: built with the same values on every rank of the pipeline. Its forward does not change and runs on every
            stage, which computes only its own layers; names of parameters do not change.
        mesh: a DeviceMesh of one axis, or with an axis named "pipeline_parallel"; the axis' group must have a
            backend for CPU tensors: it carries all messages or, with links between devices, their announcements.
        cuts: the names of the first module of each stage but the first; see `stages.find_layers`. The number of stages
            is a multiple of the number of ranks; stage s is on rank s % ranks, unless the schedule places it on
            another rank: "zbv", "dualpipev", "v_half" and "v_min" have stages r and 2 * ranks - 1 - r on rank r.
            "auto", or an `AutoCuts`: the first rank of the mesh chooses the cuts for all its ranks, to minimise the
            estimated time of the slowest stage.
        schedule: one of `SCHEDULES`, or a `Schedule` without communication for these ranks and stages; a step with
            fewer micro-batches than the `Schedule` runs only the first ones.
        num_micro_batches: the number of micro-batches in a step; a batch with fewer samples has one micro-batch per
            sample. Default: that of a given `Schedule`, else twice the number of ranks.
        micro_batch_shares: the relative sizes of the micro-batches, in place of their number: for [1, 2, 1] the second
            of three micro-batches has half of the samples. Smaller micro-batches at the ends shorten the pipeline's
            warm-up and drain; see `tune`.
        layer_stages: the stages of layers that the model registered in another order than it calls them.
        beside: the names of modules of the model that its forward does not call, such as metrics: every rank keeps
            them in full.
        device: where the parameters will be before the first step, if they are not there yet.
        verify: "auto" or "always": each stage is compared with the full model (see `verify_cuts`); "never": it is not.

    Build optimizers afterwards: each rank's `model.parameters()` are those of its stages.

    Raises:
        ValueError: cuts that do not fit the model, a model with fewer layers than "auto" needs, a number of stages that
            is not a multiple of the ranks, an unknown schedule or one for other ranks or stages, arguments that differ
            between ranks, or a stage that computes something else than the full model.
        TypeError: `cuts` is a text other than "auto".
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        cuts: Sequence[str] | str | AutoCuts,
        *,
        schedule: str | Schedule = "1f1b",
        num_micro_batches: int | None = None,
        micro_batch_shares: Sequence[float] | None = None,
        layer_stages: Mapping[str, int] | None = None,
        beside: Collection[str] = (),
        device: torch.device | None = None,
        verify: str = "auto",
    ) -> None:
        auto = auto_of(cuts)
        if isinstance(cuts, str) and auto is None:
            raise TypeError(f"pipeline: the cuts are the text {cuts!r}; pass a list of names, or 'auto'.")
        if staged_model_of(model) is not None:
            raise ValueError(f"pipeline: this {type(model).__name__} is in stages already; build the model anew.")
        check_not_compiled("pipeline:", "", model)
        self._group = pipeline_group(mesh)
        num_ranks = self._group.size()
        parameter_device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._shares = shares_of(schedule, num_micro_batches, micro_batch_shares, num_ranks)
        if auto is not None:
            choice = agree_on_cuts(
                model,
                mesh,
                auto,
                schedule,
                num_ranks=num_ranks,
                num_micro_batches=len(self._shares),
                device=device or parameter_device,
            )
            if dist.get_rank() == 0:
                _log.info(choice.text)
            names: Sequence[str] = choice.cuts
            layer_stages = {**choice.layer_stages, **(layer_stages or {})}
        else:
            assert not isinstance(cuts, (str, AutoCuts))
            names = cuts
        self._cuts = tuple(names)
        num_stages = len(names) + 1
        if num_stages % num_ranks != 0 or num_stages > MAX_STAGES:
            raise ValueError(
                f"pipeline: {len(names)} cuts make {num_stages} stages for {num_ranks} ranks; pass cuts for "
                f"{num_ranks} stages or a multiple, at most {MAX_STAGES}."
            )
        self._schedule = schedule
        self._stages_per_rank = num_stages // num_ranks
        self._lowered: dict[tuple[int, bool], Schedule] = {}
        rank_of = self.schedule(self.num_micro_batches).rank_of
        if len(rank_of) != num_stages:
            raise ValueError(
                f"pipeline: the schedule has {len(rank_of)} stages and the cuts make {num_stages}; pass a schedule for "
                f"{num_stages} stages."
            )
        own_stages = [stage for stage in range(num_stages) if rank_of[stage] == self._group.rank()]
        self._rank_of = rank_of
        check_equal_arguments(self._group, names, str(schedule), self._shares)
        layers = find_layers(model, names, layer_stages, beside)
        self._verify(model, layers, mesh, verify)
        self._staged = StagedModel(model, layers, own_stages, device)
        peers = peers_of(self._group.rank(), rank_of, [tied.name_on for tied in self._staged.tied])
        link_stages(self._group, peers, device or parameter_device)
        self._runner = Runner(self._staged, self._group)
        # Public: a Lightning strategy's step runs more code than `step` does, and publishes that code's failures, too.
        self.failures = Failures()
        self._recordings: dict[Any, list[Recording]] = {}
        self._intercepts_calls = False
        self._generation = Generation(self._staged, self._group, rank_of, self._around_generate)
        self._staged.generation = self._generation
        if hasattr(model, "generate"):
            model.__dict__["generate"] = _function_of(self.generate)  # until `_intercept_calls` changes its class

    @staticmethod
    def _verify(model: nn.Module, layers: Layers, mesh: DeviceMesh, verify: str) -> None:
        all_axes = mesh._get_root_mesh()
        has_tensor_ranks = TENSOR_PARALLEL in (all_axes.mesh_dim_names or ()) and all_axes[TENSOR_PARALLEL].size() > 1
        if verify == "never" and not has_tensor_ranks:
            return
        rehearsal = store_rehearsal(model)
        if verify != "never":
            verify_cuts(model, layers, rehearsal)
        # With tensor-parallel ranks, a plan that is applied later, when this rank has only some layers, needs it.
        if not has_tensor_ranks:
            drop_rehearsal(model)

    def fully_shard(
        self,
        mesh: DeviceMesh,
        *,
        mp_policy: MixedPrecisionPolicy | None = None,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        """Shard the parameters of this rank's layers over data-parallel ranks, by FSDP2, after `parallelize`.

        Gradients are averaged over these ranks at the end of each step and stay unsharded until then. Actions of the
        schedule gather and free a stage's parameters; a rank holds the unsharded parameters of at most two
        stages at a time.

        Args:
            mesh: the data-parallel axis, or (replicas, data-parallel) axes, of the mesh that the model is on.
            mp_policy: dtypes of gathered parameters and reduced gradients; None: the dtypes of the parameters.
            expert_mesh: as `mesh`, of the ranks that hold the same experts; None: no experts are sharded.

        Raises:
            ValueError: fully_shard was applied already, or two layers of a rank, or a layer and code between layers,
                share a parameter.
            RuntimeError: this torch's FSDP2 has no `finalize_backward`.
        """
        self._staged.check_can_be_sharded(self._rank_of)
        self._runner.sharding = ShardedStages(self._staged, mesh, mp_policy, expert_mesh)
        if mp_policy is not None:
            self._staged.record_with(mp_policy)
        self._lowered.clear()
        self._recordings.clear()  # `_check_no_shard_reads` accepted all of them while nothing was sharded

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches in a step; setting it makes their sizes as even as possible."""
        return len(self._shares)

    @num_micro_batches.setter
    def num_micro_batches(self, value: int) -> None:
        self._shares = shares_of(self._schedule, value, None, self._group.size())

    @property
    def micro_batch_shares(self) -> tuple[float, ...]:
        """Return the relative sizes of a step's micro-batches."""
        return self._shares

    @micro_batch_shares.setter
    def micro_batch_shares(self, value: Sequence[float]) -> None:
        self._shares = shares_of(self._schedule, None, value, self._group.size())

    @property
    def model(self) -> nn.Module:
        """Return the model, which has only the layers of this rank's stages."""
        return self._staged.model

    @property
    def cuts(self) -> tuple[str, ...]:
        """Return the names of the first module of each stage but the first."""
        return self._cuts

    @property
    def stages(self) -> tuple[int, ...]:
        """Return this rank's stages."""
        return self._staged.stages

    @property
    def has_last_stage(self) -> bool:
        """Return whether this rank has the last stage."""
        return len(self._rank_of) - 1 in self.stages

    @property
    def last_rank(self) -> int:
        """Return the rank, in the pipeline's group, that has the last stage."""
        return self._rank_of[-1]

    @property
    def is_recording(self) -> bool:
        """Return whether a step is running only to record the model's call, or to compare it with a recording."""
        return self._staged.is_recording

    @property
    def runs_last_stage(self) -> bool:
        """Return whether a step is running that continues after the model's call."""
        if self._generation.is_running_step:
            return self.has_last_stage
        return self._staged.running_stage == len(self._rank_of) - 1

    @property
    def is_fully_sharded(self) -> bool:
        """Return whether `fully_shard` was called."""
        return self._runner.sharding is not None

    @property
    def trace(self) -> list[Span]:
        """Return this rank's computations in the last step or evaluation, in seconds from its beginning.

        On CUDA, the times are those of the device, and the first call after a step waits for its computations.
        """
        return self._runner.trace

    def time_by(self, new_clock: Callable[[], StepClock]) -> None:
        """Time the computations of each later step by the clock that `new_clock` returns when the step begins."""
        self._runner.new_clock = new_clock

    def traces(self) -> list[list[Span]]:
        """Return the traces of all ranks, in seconds from the earliest beginning on any rank; collective.

        Times on different hosts differ by the offset of the hosts' clocks. On CUDA, the call waits for the device.
        """
        rows = [(str(span.action), span.start, span.end) for span in self.trace]
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, (self._runner.begun, rows), group=self._group)
        first = min(begun for begun, _ in gathered)
        return [
            [Span(Action.parse(action), begun - first + start, begun - first + end) for action, start, end in rows]
            for begun, rows in gathered
        ]

    @property
    def memory(self) -> list[int]:
        """Return the bytes held by this process after each computation of the trace, if memory is counted; else []."""
        return self._runner.memory

    @property
    def memory_before(self) -> int:
        """Return the bytes that this process held before the last step or evaluation; 0 if memory is not counted."""
        return self._runner.memory_before

    def schedule(self, num_micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """Return the schedule of a step, with its sends and receives, and with UNSHARD and RESHARD if fully sharded.

        Raises:
            ValueError: the pipeline's `Schedule` is for other ranks or for fewer micro-batches.
        """
        key = (num_micro_batches, forward_only)
        if key not in self._lowered:
            schedule = self._schedule
            if isinstance(schedule, str):
                schedule = Schedule.generate(
                    schedule, self._group.size(), num_micro_batches, self._stages_per_rank
                ).merge_backwards()
            elif schedule.num_ranks != self._group.size() or schedule.num_micro_batches < num_micro_batches:
                raise ValueError(
                    f"pipeline: the schedule is for {schedule.num_ranks} ranks and {schedule.num_micro_batches} "
                    f"micro-batches, and the pipeline has {self._group.size()} ranks and {num_micro_batches} "
                    "micro-batches; pass one that fits, or a schedule's name."
                )
            elif schedule.num_micro_batches > num_micro_batches:
                schedule = schedule.first_micro_batches(num_micro_batches)
            if forward_only:
                schedule = schedule.forward_only()
            schedule = schedule.add_communication()
            runner: Runner | None = getattr(self, "_runner", None)  # None: called by the constructor
            if runner is not None and runner.sharding is not None:
                schedule = schedule.add_unshards(max_unsharded=min(2, self._stages_per_rank))
            self._lowered[key] = schedule
        return self._lowered[key]

    def step(
        self,
        batch: Any,
        loss_fn: Step,
        *,
        split: Split = split_batch,
        weight: LossWeight = batch_size_of,
        scale: float = 1.0,
        stepper: Stepper | None = None,
    ) -> Tensor:
        """Run forward and backward of one batch in micro-batches; gradients are accumulated. Collective.

        Args:
            batch: the same on every rank of the pipeline.
            loss_fn: given a micro-batch, calls the model once and returns the micro-batch's loss, a scalar. It runs
                for every stage; code after the model's call runs only for the last stage. Before the schedule, every
                rank also runs it up to the model's call: once for the first micro-batch, once for each new recording
                and, if the code between layers reads values of the inputs, once for each recording that a micro-batch
                is compared with.
            split: splits the batch into the given number of micro-batches, of sizes that it chooses.
            weight: the relative weight of a micro-batch's loss. Default: the number of its samples, which is exact for
                losses that are means over samples.
            scale: a factor for the gradients; the returned loss is not scaled.
            stepper: a `weft.strategy.StepInBackward`, which steps the optimizer of `model` inside of the schedule: each
                parameter of a stage in the stage's last backward, where its gradient is then freed. Inside of its
                `accumulating()`, gradients are only accumulated.

        Returns:
            The weighted mean of the losses, `[]`, float64, the same on every rank.

        Raises:
            RuntimeError: under `torch.no_grad()`; `loss_fn` does not call the model, calls it twice, or calls it with
                other shapes or along another path than recorded; the stepper has stepped since the optimizer's
                `step()`; an earlier step failed.
            TypeError: `loss_fn` did not return a scalar.
            ValueError: a batch that cannot be split, invalid weights, a forward that cannot be recorded, or a stepper
                that steps by rows.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("pipeline: step was called while gradients are disabled; use evaluate, or enable them.")
        micro_batches = self.split(batch, split)
        weights = [float(weight(micro_batch)) for micro_batch in micro_batches]
        total = sum(weights)
        if not total > 0 or min(weights) < 0:
            raise ValueError(f"pipeline: the micro-batches weigh {weights}; pass weights from 0 on, not all 0.")
        losses: list[Tensor] = []

        def root_of(i: int, loss: Any) -> Tensor:
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(
                    f"pipeline: the step returned a {type(loss).__name__} as loss; return a tensor of one element."
                )
            weighted = loss * (weights[i] / total)
            # A loss of weight 0 may be NaN, such as a mean over no tokens.
            losses.append(weighted.detach() if weights[i] > 0 else torch.zeros_like(weighted))
            return weighted if scale == 1 else weighted * scale

        schedule = self.schedule(len(micro_batches))
        with self.failures.report_failures(), _forbidding_generate():  # once: ranks count the blocks that they enter
            if stepper is not None:
                check_can_step(stepper)
            work = Work(micro_batches, self._recordings_of(micro_batches, loss_fn), loss_fn, root_of, stepper)
            tied = TiedGradients(self._staged, self._rank_of, self._group)
            self._runner.run(schedule, work)
            tied.sum_over_stages()
            if stepper is not None:
                stepper.step_gradients(self.model.parameters())
            return self._broadcast_from_last_stage(torch.stack(losses).sum() if losses else None)

    def evaluate(self, batch: Any, step: Step, *, split: Split = split_batch) -> list[Any]:
        """Run forwards without gradients; collective. `step` is called like `loss_fn` in `Pipeline.step`.

        Returns:
            The results of `step` for each micro-batch on the last stage's rank, [] on others. If `step` calls the
            model's `generate` and not its forward, every rank runs `step` once, for the full batch.
        """
        with torch.no_grad():
            micro_batches = self.split(batch, split)
            schedule = self.schedule(len(micro_batches), forward_only=True)
            with self.failures.report_failures():
                try:
                    work = Work(micro_batches, self._recordings_of(micro_batches, step), step)
                except GenerateCall:
                    result = self._generation.run_step(step, batch)
                    return [result] if self.has_last_stage else []
                return self._runner.run(schedule, work)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`, such as that of transformers, over all stages; collective.

        `model.generate` is the same. Every rank gets the same arguments, samples the same tokens with the first rank's
        random state, and returns the same result. A rank caches the keys and values of its own layers.

        Raises:
            TypeError: the model has no `generate`.
            ValueError: the arguments differ between ranks, or the model cannot generate in stages.
        """
        self._intercept_calls()
        model: Any = self.model
        if not hasattr(model, "generate"):
            raise TypeError(f"pipeline: a {type(model).__name__} has no generate; define it in the model's class.")
        return model.generate(*args, **kwargs)

    @contextlib.contextmanager
    def _around_generate(self) -> Iterator[None]:
        """Inside, this rank's stages are gathered, so that data-parallel ranks may generate different numbers."""
        sharding = self._runner.sharding
        with self.failures.report_failures(), contextlib.ExitStack() as stack:
            for stage in self.stages if sharding is not None else ():
                assert sharding is not None
                sharding.unshard(stage)
                stack.callback(sharding.reshard, stage)
            yield

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        parameters: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Scale all stages' gradients so that their common norm is at most `max_norm`; collective over the pipeline.

        `parameters`: the parameters of this rank's stages that count; None: all of them. Tied parameters
        count once. Supports DTensors on any meshes, like `clip_gradients_by_norm`.

        Returns:
            The norm before scaling, `[]`, float64, the same on every rank.
        """
        return clip_gradients_by_norm(
            self.model.parameters() if parameters is None else parameters,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            stages=self._group,
            counted_elsewhere=secondary_copies(self._staged),
        )

    def split(self, batch: Any, split: Split | None = None) -> Sequence[Any]:
        """Return the micro-batches into which a step would split a batch.

        If parameters are tied, the first call is collective: it checks that stages shard them alike. In any case the
        first call intercepts the calls of layers, so apply plans before it.
        """
        self._intercept_calls()
        if split is not None and split is not split_batch:
            return list(split(batch, self.num_micro_batches))
        size = batch_size_of(batch)
        if size < self.num_micro_batches:
            return split_batch(batch, size)
        return split_batch(batch, self.num_micro_batches, self._shares)

    def _intercept_calls(self) -> None:
        if not self._intercepts_calls:
            check_equal_shards(self._staged, self._group)
            self.model.__dict__.pop("generate", None)
            self._staged.intercept_layer_calls()
            self._runner.lengths = SequenceLengths(self.model)
            self._intercepts_calls = True

    def _recordings_of(self, micro_batches: Sequence[Any], step: Step) -> list[Recording]:
        # A step may call the model differently for two batches of equal shapes, but not for micro-batches of one batch.
        call = self._staged.call_signature(step, micro_batches[0])
        return [self._recording(micro_batch, step, call) for micro_batch in micro_batches]

    def _recording(self, micro_batch: Any, step: Step, call: Any) -> Recording:
        key = (signature(micro_batch, with_contents=False), call, torch.is_grad_enabled(), self.model.training)
        recordings = self._recordings.setdefault(key, [])
        for recording in reversed(recordings):  # the latest recording is the likeliest match
            if self._staged.matches(recording, step, micro_batch):
                recordings.remove(recording)
                recordings.append(recording)
                return recording
        recording = self._staged.record(step, micro_batch)
        self._check_no_shard_reads(recording)
        check_tokens_stay(self._staged, recording)
        recordings.append(recording)
        del recordings[:-_MAX_RECORDINGS_PER_KEY]
        if len(self._recordings) > _MAX_KEYS:
            del self._recordings[next(iter(self._recordings))]
        return recording

    def _check_no_shard_reads(self, recording: Recording) -> None:
        """Raise ValueError if layers are fully sharded, and code between layers reads parameters of an uncalled layer.

        FSDP2 would not reduce the gradients of these parameters.
        """
        names = self._staged.layers_only_read(recording)
        if self._runner.sharding is not None and names:
            raise ValueError(
                f"pipeline: the code between layers reads the parameters of {names[0]!r} and never calls it, so that "
                "their gradients would be lost where they are fully sharded; call the layer, or replicate over the "
                "data-parallel ranks."
            )

    def _broadcast_from_last_stage(self, value: Tensor | None) -> Tensor:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        result = torch.zeros((), dtype=torch.float64, device=device) if value is None else value.double()
        dist.broadcast(result, group_src=self._rank_of[-1], group=self._group)
        return result


def _function_of(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method; copies of an object share functions, and copy methods' objects."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


@contextlib.contextmanager
def _forbidding_generate() -> Iterator[None]:
    try:
        yield
    except GenerateCall:
        raise RuntimeError(
            "pipeline: a training step calls generate, and its schedule runs one forward for each micro-batch; call "
            "generate before the step, such as in the hook on_train_batch_start."
        ) from None
