"""Executes one rank's actions of a schedule: forwards, backwards, sends, receives, gathers and frees of parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from weft import memory, ops
from weft.memory.watch import saving
from weft.strategy._plan import Action, Schedule, Span
from weft.strategy.context.sharded_sequence import shard_of
from weft.strategy.modules.kept_recomputation import keeping_recomputed
from weft.strategy.pipeline.backward import WeightHalf, backward, backward_input, edge_of
from weft.strategy.pipeline.random_streams import RandomStreams
from weft.strategy.pipeline.recording import Recording
from weft.strategy.pipeline.sequence_lengths import Lengths, SequenceLengths
from weft.strategy.pipeline.sharded_stages import ShardedStages
from weft.strategy.pipeline.staged_model import StagedModel
from weft.strategy.pipeline.step_clock import StepClock, StepTrace, clock_for
from weft.strategy.pipeline.steps_in_backward import Stepper, StepsInBackward

# Channel 2s between two ranks carries the inputs of stage s, and channel 2s + 1 their gradients; there are 1023.
MAX_STAGES = 511

Key = tuple[int, int]  # stage, micro-batch


@dataclasses.dataclass
class _SavedState:
    """The state that a stage keeps for a micro-batch between its forward and its backward."""

    inputs: list[Tensor]  # leaves that require gradients, in the order in which they are received
    # Edges of the outputs that were recorded as requiring gradients, in the order of sending; None: in this run, the
    # output does not require a gradient. On the last stage: the edge of the loss.
    outputs: list[GradientEdge | None]
    lengths: Lengths  # of the sequences in the forward
    seed: Tensor | None = None  # the gradient of the loss
    weight_half: WeightHalf | None = None


@dataclasses.dataclass
class Work:
    """The input of a schedule's run.

    micro_batches: the arguments of `step`.
    recordings: the recorded forward of each micro-batch.
    step: called once for each stage and micro-batch; only its result on the last stage is used.
    root_of: returns the weighted loss from which a micro-batch's backward starts; its arguments are the micro-batch's
        index and the result of `step`. None: there is no backward, and the run returns the results of `step`.
    stepper: steps the optimizer inside of the schedule. None: gradients are accumulated.
    """

    micro_batches: Sequence[Any]
    recordings: Sequence[Recording]
    step: Callable[[Any], Any]
    root_of: Callable[[int, Any], Tensor] | None = None
    stepper: Stepper | None = None


class Runner:
    """Runs schedules on one rank of a pipeline's group.

    staged: this rank's stages.
    group: the ranks of the pipeline, numbered as in the schedules.
    sharding: gathers and frees the layers of stages, if they are sharded over data-parallel ranks.
    lengths: the sequence lengths of the stages whose blocks compute on shards of the sequence.
    new_clock: returns the started clock of a run; None: the clock of the device.
    memory: the bytes that this process held after each computation of the trace, if memory is counted
        (`weft.memory.track`); else empty.
    memory_before: the bytes that this process held before the last run; 0 if memory is not counted.
    """

    def __init__(self, staged: StagedModel, group: dist.ProcessGroup) -> None:
        self._staged = staged
        self.sharding: ShardedStages | None = None
        self.lengths = SequenceLengths(staged.model)
        self.new_clock: Callable[[], StepClock] | None = None
        self._group_name = group.group_name
        self._rank = group.rank()
        self._trace: StepTrace | None = None
        self.memory: list[int] = []
        self.memory_before = 0
        self._has_failed = False
        self._streams = RandomStreams()

    @property
    def trace(self) -> list[Span]:
        """Return the computations of the last run that succeeded, in seconds from its beginning; [] before it.

        On CUDA, the times are those of the device, and the first call after a run waits for its computations.
        """
        return [] if self._trace is None else self._trace.spans()

    @property
    def begun(self) -> float:
        """Return the `time.time()` at which the run of `trace` began, on CUDA on the device; 0 before the first run."""
        return 0.0 if self._trace is None else self._trace.begun()

    def run(self, schedule: Schedule, work: Work) -> list[Any]:
        """Run this rank's actions.

        Returns:
            Without a `root_of`, on the rank of the last stage: the results of `work.step` by micro-batch; else [].
        """
        self.memory_before = memory.current() if memory.is_tracking() else 0
        if self._has_failed:
            raise RuntimeError(
                "pipeline: an earlier step failed and may have left messages in flight, which this step would receive; "
                "restart the processes."
            )
        self._has_failed = True
        run = _Run(self, schedule, work)
        actions, sharding = schedule.ranks[self._rank], self.sharding if schedule.has_backward else None
        steps = None
        if work.stepper is not None:
            steps = StepsInBackward(work.stepper, self._staged, actions, sharding is not None)
        if sharding is not None:
            sharding.begin()
        with self._streams.of_step():
            for action in actions:
                with contextlib.nullcontext() if steps is None else steps.during(action):
                    run.run_action(action)
        if schedule.has_communication:
            ops.pipeline_flush(self._group_name)
        if sharding is not None:
            with contextlib.nullcontext() if steps is None else steps.reducing():
                sharding.finish()
        self._has_failed = False
        self._trace, self.memory = run.trace, run.memory
        return run.results


class _Run:
    def __init__(self, runner: Runner, schedule: Schedule, work: Work) -> None:
        self._staged = runner._staged
        self._streams = runner._streams
        self._sharding = runner.sharding
        self._lengths = runner.lengths
        self._group_name = runner._group_name
        self._rank_of = schedule.rank_of
        self._rank = runner._rank
        self._last_stage = schedule.num_stages - 1
        self._has_backward = schedule.has_backward
        self._split_stages = {action.stage for action in schedule.ranks[runner._rank] if action.kind == "W"}
        self._work = work
        self._saved: dict[Key, _SavedState] = {}
        self._outputs: dict[Key, list[Tensor]] = {}  # computed here, for the next stage
        self._gradients: dict[Key, list[Tensor]] = {}  # computed here, for the previous stage
        self._tokens: dict[tuple[str, int, int], Tensor] = {}  # of posted receives
        self.trace = StepTrace(clock_for(self._staged.device) if runner.new_clock is None else runner.new_clock())
        self.memory: list[int] = []
        self._results: dict[int, Any] = {}

    @property
    def results(self) -> list[Any]:
        return [self._results[i] for i in sorted(self._results)]

    def run_action(self, action: Action) -> None:
        """Run one action; a computation first waits for its inputs, and the trace does not include this wait."""
        if action.micro_batch is None:
            assert self._sharding is not None
            (self._sharding.unshard if action.kind == "UNSHARD" else self._sharding.reshard)(action.stage)
            return
        _METHODS[action.kind](self, action.stage, action.micro_batch)

    def _begin_backward(self) -> Any:
        """Return the mark at which a backward begins; if memory is counted, begin its backward phase."""
        if memory.is_tracking():
            memory.begin_phase("backward", "scratch")
        return self.trace.mark()

    def _record_span(self, kind: str, stage: int, i: int, start: Any) -> None:
        if memory.is_tracking():
            self.memory.append(memory.current())
        self.trace.add(Action(stage, kind, i), start)

    # The values, or their shards, that cross the boundaries before and after a stage: fake tensors, of which some
    # require gradients.

    def _incoming(self, stage: int, i: int) -> list[Tensor]:
        recording = self._work.recordings[i]
        return [shard_of(recording.values[idx]) for idx in recording.crossings[stage - 1]] if stage > 0 else []

    def _outgoing(self, stage: int, i: int) -> list[Tensor]:
        return self._incoming(stage + 1, i) if stage < self._last_stage else []

    def _forward(self, stage: int, i: int) -> None:
        incoming = self._incoming(stage, i)
        received = self._take_outputs(stage, i) if incoming else []
        received = [_strided_like(value, fake) for value, fake in zip(received, incoming, strict=True)]
        start = self.trace.mark()
        needs = [self._has_backward and fake.requires_grad for fake in incoming]
        leaves = [v.requires_grad_() if need else v for v, need in zip(received, needs, strict=True)]
        values = [_StageInput.apply(leaf) if need else leaf for leaf, need in zip(leaves, needs, strict=True)]
        work = self._work
        self._streams.begin(i)
        with saving(received), keeping_recomputed(stage in self._split_stages):
            result, sent = self._staged.run(
                work.recordings[i],
                stage,
                values,
                work.step,
                work.micro_batches[i],
                lambda: self._streams.begin(i, stage) if stage > 0 else None,
            )
        if stage == self._last_stage:
            if work.root_of is None:
                self._results[i] = result
                outputs, seed = [], None
            else:
                root = work.root_of(i, result)
                outputs, seed = [edge_of(root)], torch.ones_like(root)
        else:
            assert sent is not None
            outputs, seed = self._checked_edges(stage, i, sent), None
            self._outputs[stage, i] = [_tensor_to_send(value) for value in sent]
        if self._has_backward:
            inputs = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
            self._saved[stage, i] = _SavedState(inputs, outputs, self._lengths.current(), seed)
        self._record_span("F", stage, i, start)

    def _checked_edges(self, stage: int, i: int, sent: list[Tensor]) -> list[GradientEdge | None]:
        edges = []
        for fake, value in zip(self._outgoing(stage, i), sent, strict=True):
            if (value.shape, value.dtype) != (fake.shape, fake.dtype):
                remedy = "let shapes follow from the inputs' shapes"
                if value.shape == fake.shape:
                    remedy = "use the same autocast and the same hooks for all stages and steps"
                raise RuntimeError(
                    f"pipeline: stage {stage} sends {tuple(value.shape)} {value.dtype} where {tuple(fake.shape)} "
                    f"{fake.dtype} was recorded; {remedy}."
                )
            if not self._has_backward:
                continue
            if value.requires_grad and not fake.requires_grad:
                raise RuntimeError(
                    f"pipeline: a value of shape {tuple(value.shape)} that leaves stage {stage} requires a gradient, "
                    "and did not when it was recorded; freeze and unfreeze parameters before the model is split."
                )
            if fake.requires_grad:
                edges.append(edge_of(value))
        return edges

    def _backward(self, stage: int, i: int) -> None:
        gradients = self._take_gradients(stage, i)
        start = self._begin_backward()
        saved = self._saved.pop((stage, i))
        with self._lengths.restored(saved.lengths):
            backward(*_paired(saved.outputs, gradients))
        self._gradients[stage, i] = [_gradient_of(leaf, leaf.grad) for leaf in saved.inputs]
        del saved, gradients
        self._record_span("B", stage, i, start)

    def _backward_input(self, stage: int, i: int) -> None:
        gradients = self._take_gradients(stage, i)
        start = self._begin_backward()
        saved = self._saved[stage, i]
        with self._lengths.restored(saved.lengths):
            found, saved.weight_half = backward_input(*_paired(saved.outputs, gradients), saved.inputs)
        self._gradients[stage, i] = [_gradient_of(*pair) for pair in zip(saved.inputs, found, strict=True)]
        saved.inputs, saved.outputs = [], []
        del saved, gradients, found
        self._record_span("I", stage, i, start)

    def _backward_weight(self, stage: int, i: int) -> None:
        start = self._begin_backward()
        saved = self._saved.pop((stage, i))
        assert saved.weight_half is not None
        with self._lengths.restored(saved.lengths):
            saved.weight_half.run()
        del saved
        self._record_span("W", stage, i, start)

    # Messages. A message without tensors is not sent: both sides know from the recording that it has none.

    def _take_outputs(self, stage: int, i: int) -> list[Tensor]:
        """Return the outputs of the previous stage."""
        if self._rank_of[stage - 1] == self._rank:
            return [value.detach() for value in self._outputs.pop((stage - 1, i))]
        return ops.pipeline_wait(self._tokens.pop(("F", stage, i)))

    def _take_gradients(self, stage: int, i: int) -> list[Tensor]:
        """Return the gradients of this stage's outputs, from the next stage; on the last stage, that of the loss."""
        seed = self._saved[stage, i].seed
        if stage == self._last_stage:
            return [] if seed is None else [seed]
        if not any(fake.requires_grad for fake in self._outgoing(stage, i)):
            return []
        if self._rank_of[stage + 1] == self._rank:
            return self._gradients.pop((stage + 1, i))
        return ops.pipeline_wait(self._tokens.pop(("B", stage, i)))

    def _send_forward(self, stage: int, i: int) -> None:
        values = self._outputs.pop((stage, i))
        if values:
            ops.pipeline_send(values, self._rank_of[stage + 1], 2 * (stage + 1), self._group_name)

    def _recv_forward(self, stage: int, i: int) -> None:
        likes = [_like(fake) for fake in self._incoming(stage, i)]
        if likes:
            peer = self._rank_of[stage - 1]
            self._tokens["F", stage, i] = ops.pipeline_recv(likes, peer, 2 * stage, self._group_name)

    def _send_backward(self, stage: int, i: int) -> None:
        gradients = self._gradients.pop((stage, i))
        if gradients:
            ops.pipeline_send(gradients, self._rank_of[stage - 1], 2 * stage + 1, self._group_name)

    def _recv_backward(self, stage: int, i: int) -> None:
        likes = [_like(fake) for fake in self._outgoing(stage, i) if fake.requires_grad]
        if likes:
            peer = self._rank_of[stage + 1]
            self._tokens["B", stage, i] = ops.pipeline_recv(likes, peer, 2 * (stage + 1) + 1, self._group_name)


# Functions: bound methods, held by a `_Run`, would be a reference cycle, which delays the release of its tensors.
_METHODS = {
    "F": _Run._forward,
    "B": _Run._backward,
    "I": _Run._backward_input,
    "W": _Run._backward_weight,
    "SEND_F": _Run._send_forward,
    "RECV_F": _Run._recv_forward,
    "SEND_B": _Run._send_backward,
    "RECV_B": _Run._recv_backward,
}


class _StageInput(torch.autograd.Function):
    """Returns a non-leaf tensor with a leaf's storage, which a layer may change in place.

    In the unsplit model, too, a layer may change the output of an earlier layer in place.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _tensor_to_send(value: Tensor) -> Tensor:
    """Return the detached tensor; a copy if it is a leaf or view, which may change while the send is in flight.

    Leaves are parameters and buffers; in an evaluation, all tensors are leaves.
    """
    return value.detach().clone() if value.is_leaf or value._is_view() else value.detach()


def _strided_like(value: Tensor, fake: Tensor) -> Tensor:
    """Return a received value with the strides of the recorded one, on which the code of later stages may rely.

    Messages are contiguous. Recorded strides with gaps or overlaps are not restored.
    """
    if value.stride() == fake.stride() or torch.empty_like(fake).stride() != fake.stride():
        return value
    return torch.empty_strided(fake.shape, fake.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _like(fake: Tensor) -> Tensor:
    """Return a tensor of a fake tensor's shape, dtype and device, in the memory of one element."""
    return torch.empty((), dtype=fake.dtype, device=fake.device).expand(fake.shape)


def _paired(
    outputs: Sequence[GradientEdge | None], gradients: Sequence[Tensor]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return (the edges of the outputs that require gradients, these gradients)."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o is not None]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _gradient_of(leaf: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient
