"""Records once, on fake tensors, what a model's forward computes between its layers."""

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

from weft.strategy.pipeline.layer_calls import LayerCall, Mode, run_in_mode
from weft.strategy.pipeline.micro_batches import signature
from weft.strategy.pipeline.random_streams import preserving_random_state
from weft.strategy.pipeline.stages import ANY_STAGE

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
    """The result of a layer or a torch function in a forward; `output` holds fake tensors if it comes from layers."""

    name: str
    function: Any
    output: Any
    is_fake: bool


@dataclasses.dataclass
class Recording:
    """One forward of the full model.

    events: the calls outside of layers that returned tensors, in order.
    values: the values that come from layers, by number; each fake tensor once.
    crossings: the numbers of the values that cross each boundary, that from stage b to b + 1 at index b.
    read_values: the values of inputs that the code between layers asked for, and on which its path may depend.
    arguments: the signature of the model's arguments.
    """

    num_stages: int
    arguments: Any
    events: list[Event] = dataclasses.field(default_factory=list)
    values: list[FakeTensor] = dataclasses.field(default_factory=list)
    crossings: list[list[int]] = dataclasses.field(default_factory=list)
    read_values: list[Any] = dataclasses.field(default_factory=list)
    _numbers: dict[int, int] = dataclasses.field(default_factory=dict)

    def number_of(self, value: Tensor) -> int | None:
        return self._numbers.get(id(value))

    def add(self, value: FakeTensor) -> int:
        number = self._numbers.setdefault(id(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class _Recorder(Mode):
    """Runs a skeleton's forward on fake tensors."""

    def __init__(self, recording: Recording, fake_mode: FakeTensorMode, owners: dict[int, int]) -> None:
        super().__init__()
        self._recording = recording
        self._fake_mode = fake_mode
        self._stage = 0  # the stage that the forward has reached
        self._produced: dict[int, int] = {}  # the stage that each value comes from, by its number
        self._last_use: dict[int, int] = {}
        self._versions: list[list[int]] = []  # of all values, at the time each boundary was crossed
        self._owners = owners  # the stage of each parameter of the trunk, by the id of its fake tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fakes = self._use((args, kwargs))
        if not fakes:
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

    def call_layer(self, layer: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, stage = layer._weft_layer
        if stage != ANY_STAGE and stage < self._stage:
            remedy = f"pass layer_stages={{{name!r}: {self._stage}}}"
            if any(event.function == name for event in self._recording.events):
                remedy = "give each stage a module of its own"
            raise ValueError(
                f"pipeline: the forward calls the layer {name!r} of stage {stage} after layers of stage {self._stage}; "
                f"move the cuts, or {remedy}."
            )
        if stage > self._stage:
            # Values cross with these versions: a value with a later version was changed in place afterwards.
            self._versions += (stage - self._stage) * [[value._version for value in self._recording.values]]
            self._stage = stage
        fakes = self._use((args, kwargs))
        if stage == ANY_STAGE and not fakes:
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
        fakes = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, FakeTensor)]
        for fake in fakes:
            number = self._recording.add(fake)
            self._produced.setdefault(number, self._owners.get(id(fake), self._stage))
            self._last_use[number] = self._stage
        return bool(fakes)

    def _record_output(self, name: str, function: Any, output: Any) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if not leaves:
            return
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        for fake in fakes:
            self._produced.setdefault(self._recording.add(fake), self._stage)
        self._recording.events.append(Event(name, function, output if fakes else None, bool(fakes)))

    def finish(self, output: Any) -> None:
        """Note that the forward's result is used on the last stage."""
        recording = self._recording
        self._stage = recording.num_stages - 1
        self._use(output)
        recording.crossings = [
            [n for n in range(len(recording.values)) if self._produced[n] <= b < self._last_use.get(n, -1)]
            for b in range(recording.num_stages - 1)
        ]
        self._check_aliases()
        _drop_graphs(recording)

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise if layers' values are written into a real tensor: stages without them would keep its old values."""
        targets = [kwargs.get("out")]
        if writes_in_place(name_of(func)) and args:
            targets.append(args[0])
        is_real = any(isinstance(t, Tensor) and not isinstance(t, FakeTensor) for t in pytree.tree_leaves(targets))
        if is_real and self._recording.num_stages > 1:
            raise ValueError(
                f"pipeline: {name_of(func)} writes what layers compute into a tensor that was made between them, which "
                "stages without these values cannot do; make a new tensor of both (torch.where, torch.cat, +), or let "
                "a layer do it."
            )

    def _check_aliases(self) -> None:
        recording = self._recording
        for b, numbers in enumerate(recording.crossings):
            by_storage: dict[int, list[int]] = {}
            for number in numbers:
                storage = recording.values[number].untyped_storage()._cdata
                by_storage.setdefault(storage, []).append(number)
            versions = self._versions[b] if b < len(self._versions) else []
            for group in by_storage.values():
                changed = [n for n in group if n < len(versions) and recording.values[n]._version != versions[n]]
                if len(group) > 1 and changed:
                    raise ValueError(
                        f"pipeline: a value of shape {tuple(recording.values[changed[0]].shape)} and a view of it "
                        f"cross to stage {b + 1}, where it is changed in place and the view would not follow; change "
                        "a copy."
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


_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor", "lshift", "rshift", "pow", "matmul", "mod")


def writes_in_place(name: str) -> bool:
    is_method = name.endswith("_") and not name.startswith("__")
    return is_method or name == "__setitem__" or name in {f"__i{operation}__" for operation in _IN_PLACE}


def _drop_graphs(recording: Recording) -> None:
    """Drop the graphs of fake tensors, which keep the inputs of the recording alive."""
    for value in recording.values:
        if value.grad_fn is not None and not value._is_view():
            value.detach_().requires_grad_()


def record(
    skeleton: nn.Module,
    num_stages: int,
    fake_mode: FakeTensorMode,
    owners: dict[int, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Recording:
    """Run a skeleton's forward on these inputs without changing random states.

    Raises:
        ValueError: layers are called out of the order of their stages, or a call fails on fake tensors.
    """
    recording = Recording(num_stages, signature((args, kwargs)))
    recorder = _Recorder(recording, fake_mode, owners)
    with preserving_random_state():
        output = run_in_mode(recorder, lambda: skeleton.forward(*args, **kwargs))
    recorder.finish(output)
    return recording


def comparable_value(output: Any) -> Any:
    return output if isinstance(output, (bool, int)) else repr(output)  # nan is not equal to itself


def name_of(function: Any) -> str:
    return getattr(function, "__name__", str(function))
