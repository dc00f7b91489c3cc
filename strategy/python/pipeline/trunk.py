"""Runs one stage's part of a model's own forward.

Every stage runs the unchanged forward of the model, whose layers are distributed over the stages. The stages differ
only in the results of calls:

    layers of earlier stages     return what they returned in the recording: fake tensors, which only have shapes
    layers of this stage         compute, with received tensors in place of the fake tensors
    first layer of a later stage ends the forward by raising `ForwardExit`, which no `except Exception` catches

Until the first layer of this stage, torch functions and layers without a stage also return recorded results if an
argument is a fake tensor. Code between layers that depends only on the model's inputs (masks, positions) computes on
every stage. Values that come from layers cross a boundary if a later stage uses them, so every stage in between passes
on a skip connection. A recording determines these values: one forward of the full model on fake tensors, without
arithmetic or memory, for each kind of inputs (and, if the code between layers reads values of the inputs, for each
combination of these values). All stages get the same inputs and make the same recording, so they agree without
communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from weft.strategy.context.sharded_sequence import like, shard_of
from weft.strategy.pipeline.fake_mode import is_recorded
from weft.strategy.pipeline.layer_calls import InterceptedLayer, Mode
from weft.strategy.pipeline.recording import VALUE_READS, Event, Recording, comparable_value, name_of
from weft.strategy.pipeline.stages import ANY_STAGE


class OtherPathError(RuntimeError):
    """A forward differed from its recording."""


class ForwardExit(BaseException):
    """Ends a forward, and the code that calls it, at the first layer of a later stage."""


class StageRun(Mode):
    """Runs one stage's part of a forward for one micro-batch, or a probe.

    A probe only compares a forward with its recording: the layers of all stages return their recorded results.

    stage: the stage to run; for a probe, the number of stages.
    received: the values that cross the boundary before this stage, or their shards; None for a probe.
    before_layers: a function to call before the first layer of the stage, or None.
    sent: after the forward, the values that cross the boundary after this stage, or their shards; None on the last
        stage.
    """

    def __init__(
        self,
        recording: Recording,
        stage: int,
        received: Iterable[Tensor] | None,
        before_layers: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._before_layers = before_layers
        self.is_probe = received is None
        self.arguments = recording.arguments
        self._recording = recording
        self._target = stage
        self._reached_stage = 0  # the highest stage of a layer called so far
        self._read_values: list[Any] = []
        self._next_event = 0
        incoming = recording.crossings[stage - 1] if stage > 0 and received is not None else []
        # By index in recording.values.
        self._values = {
            idx: like(recording.values[idx], value) for idx, value in zip(incoming, received or (), strict=True)
        }
        self._outgoing = set(recording.crossings[stage]) if stage + 1 < recording.num_stages else set()
        self.sent: list[Tensor] | None = None

    def add_value(self, fake: Tensor, value: Tensor) -> None:
        """Add the value of a parameter on this rank that code between layers reads; the value may cross boundaries."""
        idx = self._recording.idx_of(fake)
        if idx is not None:
            self._values.setdefault(idx, value)

    @property
    def stage(self) -> int:
        return self._target

    @property
    def _is_earlier_stage(self) -> bool:
        return self._reached_stage < self._target

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_fakes = _has_fakes(args) or _has_fakes(kwargs)
        if has_fakes and self._is_earlier_stage:
            event = self._take_event(func)
            if event is not None:
                return event.output
        if has_fakes and not self._is_earlier_stage:
            args, kwargs = self.with_values((args, kwargs))
        output = func(*args, **kwargs)
        if _has_tensor(output):
            self._store_output(name_of(func), func, output)
        elif self._recording.read_values and name_of(func) in VALUE_READS:
            self._read_values.append(comparable_value(output))
        return output

    def call_layer(self, layer: InterceptedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the layer, return its recorded result, or end the forward."""
        name, stage = layer._weft_layer
        if stage > self._target:
            self.sent = [shard_of(self._values[idx]) for idx in self._recording.crossings[self._target]]
            raise ForwardExit
        self._reached_stage = max(self._reached_stage, stage)
        if self._is_earlier_stage and (stage != ANY_STAGE or _has_fakes(args) or _has_fakes(kwargs)):
            event = self._take_event(name)
            if event is None:
                raise self._path_error(name)
            return event.output
        if not self._is_earlier_stage:
            args, kwargs = self.with_values((args, kwargs))
        if stage == self._target and self._before_layers is not None:
            self._before_layers()
            self._before_layers = None
        output = self._without_interception(lambda: layer.call_directly(args, kwargs))
        if _has_tensor(output):
            self._store_output(name, name, output)
        return output

    def with_values(self, tree: Any) -> Any:
        """Return the tree with received and computed values in place of fake tensors."""
        return pytree.tree_map(lambda leaf: self._value_of(leaf) if is_recorded(leaf) else leaf, tree)

    def _value_of(self, fake: FakeTensor) -> Tensor:
        idx = self._recording.idx_of(fake)
        if idx is None or idx not in self._values:
            raise RuntimeError(
                f"pipeline: stage {self._target} uses a tensor of shape {tuple(fake.shape)} of an earlier stage that "
                "was not recorded; between layers, call functions of torch and no autograd.Function, or move the code "
                "into a layer."
            )
        return self._values[idx]

    def _take_event(self, callee: Any) -> Event | None:
        """Return the next event and advance, if it is a call of this layer or function; else return None."""
        events = self._recording.events
        if self._next_event < len(events) and events[self._next_event].callee == callee:
            self._next_event += 1
            return events[self._next_event - 1]
        return None

    def _store_output(self, name: str, callee: Any, output: Any) -> None:
        """Store those values of a call's output that cross the boundary after this stage."""
        event = self._take_event(callee)
        if event is None:
            raise self._path_error(name)
        if event.has_fakes and not self._is_earlier_stage:
            recorded, values = pytree.tree_leaves(event.output), pytree.tree_leaves(output)
            if len(recorded) != len(values):
                raise self._path_error(name)
            for fake, value in zip(recorded, values, strict=True):
                idx = self._recording.idx_of(fake) if is_recorded(fake) else None
                if idx in self._outgoing:
                    self._values[idx] = value

    @property
    def matches_recording(self) -> bool:
        """Return, after a complete forward, whether all recorded events occurred, with the same read values."""
        return self._next_event == len(self._recording.events) and self._read_values == self._recording.read_values

    def _path_error(self, name: str) -> OtherPathError:
        events = self._recording.events
        expected = events[self._next_event].name if self._next_event < len(events) else "its end"
        return OtherPathError(
            f"pipeline: the forward calls {name} where its recording for inputs of these shapes and values has "
            f"{expected}; between layers, do not let random numbers choose the model's path."
        )


def _has_fakes(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return is_recorded(tree)
    if isinstance(tree, (tuple, list)):
        return any(_has_fakes(item) for item in tree)
    if isinstance(tree, dict):
        return any(_has_fakes(item) for item in tree.values())
    if tree is None or isinstance(tree, (int, float, str, torch.dtype, torch.device)):
        return False
    return any(is_recorded(leaf) for leaf in pytree.tree_leaves(tree))


def _has_tensor(tree: Any) -> bool:
    return isinstance(tree, Tensor) or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))
