"""Records once, on fake tensors, what a model's forward computes between its layers.

The recorded forward is that of the model's *skeleton*: a copy of the full model in which parameters, and buffers of
layers, are fake tensors, which have shapes and no values. A value that depends on a layer of a stage or on a parameter
is then a fake tensor, too; code between layers that depends only on the model's inputs computes on real tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from weft.strategy.context.sharded_sequence import shard_of
from weft.strategy.pipeline.fake_mode import is_recorded
from weft.strategy.pipeline.layer_calls import InterceptedLayer, Mode, run_in_mode
from weft.strategy.pipeline.micro_batches import signature
from weft.strategy.pipeline.random_streams import preserving_random_state
from weft.strategy.pipeline.stages import ANY_STAGE
from weft.strategy.torch_functions import writes_in_place

# Functions whose results are Python values that depend on a tensor's values.
VALUE_READS = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "item",
    "tolist",
    "numpy",
    "equal",
    "is_nonzero",
    "__contains__",
    "allclose",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """A call of a layer, or of a torch function between layers, that returned tensors.

    name: of the layer or the function, for errors.
    callee: the layer's name, or the function itself.
    output: the result if it contains fake tensors; else None.
    has_fakes: whether the result contains fake tensors, which are values that depend on layers or parameters.
    """

    name: str
    callee: Any
    output: Any
    has_fakes: bool


@dataclasses.dataclass
class Recording:
    """One forward of the full model.

    events: the calls of layers, and of torch functions between them, that returned tensors, in order.
    values: the fake tensors that are arguments or results of these calls, each once: results of layers, values computed
        from them, and parameters that code between layers reads. With context parallelism, sharded sequences of them.
    crossings: crossings[b] has the indices in `values` of the values that cross the boundary from stage b to b + 1.
    read_values: the Python values that code between layers read from real tensors, and on which its path may depend.
    arguments: the signature of the model's arguments.
    """

    num_stages: int
    arguments: Any
    events: list[Event] = dataclasses.field(default_factory=list)
    values: list[FakeTensor] = dataclasses.field(default_factory=list)
    crossings: list[list[int]] = dataclasses.field(default_factory=list)
    read_values: list[Any] = dataclasses.field(default_factory=list)
    _indices: dict[int, int] = dataclasses.field(default_factory=dict)

    def idx_of(self, value: Tensor) -> int | None:
        """Return the index of a fake tensor in `values`; None: they do not contain it."""
        return self._indices.get(id(value))

    def add(self, value: FakeTensor) -> int:
        """Add a fake tensor to `values`, unless they contain it; return its index."""
        idx = self._indices.setdefault(id(value), len(self.values))
        if idx == len(self.values):
            self.values.append(value)
        return idx


class _Recorder(Mode):
    """Records the calls of a skeleton's forward. `fake_mode` and `stage_of_parameter`: as in `record`."""

    def __init__(self, recording: Recording, fake_mode: FakeTensorMode, stage_of_parameter: dict[int, int]) -> None:
        super().__init__()
        self._recording = recording
        self._fake_mode = fake_mode
        self._reached_stage = 0  # by the forward
        self._produced: dict[int, int] = {}  # the stage that each value comes from, by the value's index
        self._last_use: dict[int, int] = {}  # the last stage that uses each value, by the value's index
        self._versions: list[list[int]] = []  # of all values so far, at the time each boundary was crossed
        self._stage_of_parameter = stage_of_parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_fakes = self._use((args, kwargs))
        if not has_fakes:
            output = func(*args, **kwargs)
            if name_of(func) in VALUE_READS:
                self._recording.read_values.append(comparable_value(output))
        else:
            self._check_writes(func, args, kwargs)
            try:
                with self._fake_mode:
                    output = func(*args, **kwargs)
            except Exception as error:
                raise self._recording_error(f"{name_of(func)} between the layers", error) from error
        self._record_output(name_of(func), func, output)
        return output

    def call_layer(self, layer: InterceptedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, stage = layer._weft_layer
        if stage != ANY_STAGE and stage < self._reached_stage:
            remedy = (
                f"pass pipeline_cuts='auto' with an example of the inputs (to a Pipeline: "
                f"layer_stages={{{name!r}: {self._reached_stage}}})"
            )
            if any(event.callee == name for event in self._recording.events):
                remedy = "give each stage its own module"
            raise ValueError(
                f"pipeline: the forward calls the layer {name!r} of stage {stage} after layers of stage "
                f"{self._reached_stage}, and layers must be called in the order of their stages; move the cuts, or "
                f"{remedy}."
            )
        if stage > self._reached_stage:
            # Values cross with these versions: a value with a later version was changed in place afterwards. If they
            # were intercepted, these reads would count as uses on the stage before the boundary.
            versions = self._without_interception(lambda: [shard_of(each)._version for each in self._recording.values])
            self._versions += (stage - self._reached_stage) * [versions]
            self._reached_stage = stage
        has_fakes = self._use((args, kwargs))
        if stage == ANY_STAGE and not has_fakes:
            output = self._without_interception(lambda: layer.call_directly(args, kwargs))
        else:
            try:
                with self._fake_mode:
                    output = self._without_interception(lambda: layer.call_directly(args, kwargs))
            except Exception as error:
                raise self._recording_error(f"the layer {name!r}", error) from error
        self._record_output(name, name, output)
        return output

    def _use(self, arguments: Any) -> bool:
        """Record that the current stage uses the fake tensors in a call's arguments; return whether there are any."""
        fakes = [leaf for leaf in pytree.tree_leaves(arguments) if is_recorded(leaf)]
        for fake in fakes:
            idx = self._recording.add(fake)
            self._produced.setdefault(idx, self._stage_of_parameter.get(id(fake), self._reached_stage))
            self._last_use[idx] = self._reached_stage
        return bool(fakes)

    def _record_output(self, name: str, callee: Any, output: Any) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if not leaves:
            return
        fakes = [leaf for leaf in leaves if is_recorded(leaf)]
        for fake in fakes:
            self._produced.setdefault(self._recording.add(fake), self._reached_stage)
        self._recording.events.append(Event(name, callee, output if fakes else None, bool(fakes)))

    def finish(self, output: Any) -> None:
        """Complete the recording: determine the values that cross boundaries, and check them.

        `output`: the forward's result, which the last stage uses.
        """
        recording = self._recording
        self._reached_stage = recording.num_stages - 1
        self._use(output)
        recording.crossings = [
            [idx for idx in range(len(recording.values)) if self._produced[idx] <= b < self._last_use.get(idx, -1)]
            for b in range(recording.num_stages - 1)
        ]
        self._check_aliases()
        _drop_graphs(recording)

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise ValueError if a value of layers is written into a real tensor, which stages without it cannot do."""
        targets = [kwargs.get("out")]
        if writes_in_place(name_of(func)) and args:
            targets.append(args[0])
        is_real = any(isinstance(t, Tensor) and not is_recorded(t) for t in pytree.tree_leaves(targets))
        if is_real and self._recording.num_stages > 1:
            raise ValueError(
                f"pipeline: {name_of(func)} writes a value that layers compute into a tensor that was made between the "
                "layers, which stages without the value cannot do; make a new tensor of both (torch.where, torch.cat, "
                "+), or write inside a layer."
            )

    def _check_aliases(self) -> None:
        """Raise ValueError if a value and a view of it cross a boundary, and one is changed in place afterwards."""
        recording = self._recording
        for b, indices in enumerate(recording.crossings):
            by_storage: dict[int, list[int]] = {}
            for idx in indices:
                storage = shard_of(recording.values[idx]).untyped_storage()._cdata
                by_storage.setdefault(storage, []).append(idx)
            versions = self._versions[b] if b < len(self._versions) else []
            for aliases in by_storage.values():
                values = {i: shard_of(recording.values[i]) for i in aliases if i < len(versions)}
                changed = [i for i, value in values.items() if value._version != versions[i]]
                if len(aliases) > 1 and changed:
                    raise ValueError(
                        f"pipeline: a value of shape {tuple(recording.values[changed[0]].shape)} and a view of it "
                        f"cross to stage {b + 1} as separate tensors, and one of them is changed in place there, which "
                        "the other would not show; change a clone instead."
                    )

    @staticmethod
    def _recording_error(what: str, error: Exception) -> ValueError:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            return ValueError(
                f"pipeline: {what} reads values that layers compute, or makes a shape depend on them ({error}), and "
                "stages record the forward on fake tensors, which have shapes and no values; use torch.where, masks "
                "and fixed sizes, or wrap the code in a torch.library.custom_op with a fake implementation."
            )
        return ValueError(
            f"pipeline: {what} raised {type(error).__name__} ({str(error).rstrip('.')}) while the forward was recorded "
            "on fake tensors, which have shapes and no values; check that the unsharded model takes inputs of these "
            "shapes, and that it reads no values (.numpy(), a tensor as a list's index)."
        )


def _drop_graphs(recording: Recording) -> None:
    """Drop the autograd graphs of fake tensors except views: a graph keeps the inputs of the recording alive."""
    for value in map(shard_of, recording.values):
        if value.grad_fn is not None and not value._is_view():
            value.detach_().requires_grad_()


def record(
    skeleton: nn.Module,
    num_stages: int,
    fake_mode: FakeTensorMode,
    stage_of_parameter: dict[int, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Recording:
    """Return a recording of a skeleton's forward; torch's random states do not change.

    Args:
        skeleton: the model with fake tensors, whose layers' calls are intercepted (`intercept_calls`).
        num_stages: the number of stages of the pipeline.
        fake_mode: the mode of the skeleton's fake tensors.
        stage_of_parameter: the stage of each parameter, by the id of its fake tensor.
        args, kwargs: the real arguments of the forward.

    Raises:
        ValueError: layers are called out of the order of their stages, a call fails on fake tensors, a value of layers
            is written into a real tensor, or a value that crosses with a view of it is changed in place afterwards.
    """
    recording = Recording(num_stages, signature((args, kwargs)))
    recorder = _Recorder(recording, fake_mode, stage_of_parameter)
    with preserving_random_state():
        output = run_in_mode(recorder, lambda: skeleton.forward(*args, **kwargs))
    recorder.finish(output)
    return recording


def comparable_value(output: Any) -> Any:
    """Return a value read from a tensor in a form that is equal for equal values, also for nan."""
    return output if isinstance(output, (bool, int)) else repr(output)


def name_of(function: Any) -> str:
    """Return a function's name."""
    return getattr(function, "__name__", str(function))
