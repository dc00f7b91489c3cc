"""Runs one stage's part of a model's own forward.

The forward of a model whose layers are spread over stages runs on every stage as it is written. What differs is what
its layers do when they are called:

    layers of earlier stages   give what they gave when the forward was recorded: fake tensors, which only have shapes
    layers of this stage       compute, with what was received in place of the fake tensors
    the first of a later stage ends the forward here: by `Leave`, an exception that no `except Exception` catches

What is computed between layers from the model's inputs alone (masks, positions) is computed on every stage; what comes
from layers crosses the boundaries as far as it is used, so that a skip connection over several stages is passed on by
each of them. Which values these are, a recording tells: one forward of the whole model on fake tensors, without
arithmetic or memory, once for each kind of inputs (and, where the code between layers asks for values of the inputs,
for each kind of answers). All ranks see the same inputs and record the same, so that nothing has to be sent to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from weft.strategy.pipeline.layer_calls import LayerCall, Mode
from weft.strategy.pipeline.recording import QUESTIONS, Event, Recording, answer_of, name_of
from weft.strategy.pipeline.stages import ANY_STAGE


class OtherPathError(RuntimeError):
    """A forward did not do what was recorded."""


class Leave(BaseException):
    """Ends a forward, and whatever calls it, at the first layer of a later stage."""


class StageRun(Mode):
    """Runs one stage's part of a forward for one micro-batch.

    stage: of a probe, which runs no layer at all, the number of stages.
    received: the values that cross the boundary before this stage; None: of a probe.
    before_layers: called before the first layer of the stage, if any.
    sent: after the forward, those that cross the one after it.
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
        self._stage = 0
        self._answers: list[Any] = []
        self._next_event = 0
        numbers = recording.crossings[stage - 1] if stage > 0 and received is not None else []
        self._values = dict(zip(numbers, received or (), strict=True))
        self._wanted = set(recording.crossings[stage]) if stage + 1 < recording.num_stages else set()
        self.sent: list[Tensor] | None = None

    def add_value(self, fake: FakeTensor, value: Tensor) -> None:
        """Say what a parameter of the trunk is on its own stage, for it may cross to others."""
        number = self._recording.number_of(fake)
        if number is not None:
            self._values.setdefault(number, value)

    @property
    def stage(self) -> int:
        return self._target

    @property
    def _is_before(self) -> bool:
        return self._stage < self._target

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_fakes = _has_fakes(args) or _has_fakes(kwargs)
        if has_fakes and self._is_before:
            event = self._recorded(func)
            if event is not None:
                return event.output
        if has_fakes and not self._is_before:
            args, kwargs = self.with_values((args, kwargs))
        output = func(*args, **kwargs)
        if _has_tensor(output):
            self._take(name_of(func), func, output)
        elif self._recording.answers and name_of(func) in QUESTIONS:
            self._answers.append(answer_of(output))
        return output

    def call_layer(self, layer: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute it, give what was recorded, or leave."""
        name, stage = layer._weft_layer
        if stage > self._target:
            self.sent = [self._values[number] for number in self._recording.crossings[self._target]]
            raise Leave
        self._stage = max(self._stage, stage)
        if self._is_before and (stage != ANY_STAGE or _has_fakes(args) or _has_fakes(kwargs)):
            event = self._recorded(name)
            if event is None:
                raise self._other_path(name)
            return event.output
        if not self._is_before:
            args, kwargs = self.with_values((args, kwargs))
        if stage == self._target and self._before_layers is not None:
            self._before_layers()
            self._before_layers = None
        output = self._outside(lambda: layer.call_itself(args, kwargs))
        if _has_tensor(output):
            self._take(name, name, output)
        return output

    def with_values(self, tree: Any) -> Any:
        """The same with what was received, or computed since, in place of fake tensors."""
        return pytree.tree_map(lambda leaf: self._value_of(leaf) if isinstance(leaf, FakeTensor) else leaf, tree)

    def _value_of(self, fake: FakeTensor) -> Tensor:
        number = self._recording.number_of(fake)
        if number is None or number not in self._values:
            raise RuntimeError(
                f"pipeline: stage {self._target} was given a tensor of shape {tuple(fake.shape)} that an earlier stage "
                "has and nothing recorded; call functions of torch between layers, not an autograd.Function, or put it "
                "inside a layer."
            )
        return self._values[number]

    def _recorded(self, function: Any) -> Event | None:
        """The next event, if it is one of this function."""
        events = self._recording.events
        if self._next_event < len(events) and events[self._next_event].function == function:
            self._next_event += 1
            return events[self._next_event - 1]
        return None

    def _take(self, name: str, function: Any, output: Any) -> None:
        event = self._recorded(function)
        if event is None:
            raise self._other_path(name)
        if event.is_fake and not self._is_before:
            recorded, values = pytree.tree_leaves(event.output), pytree.tree_leaves(output)
            if len(recorded) != len(values):
                raise self._other_path(name)
            for fake, value in zip(recorded, values, strict=True):
                number = self._recording.number_of(fake) if isinstance(fake, FakeTensor) else None
                if number in self._wanted:
                    self._values[number] = value

    @property
    def took_the_same_path(self) -> bool:
        """After a whole forward: whether all that was recorded came, and for the same answers."""
        return self._next_event == len(self._recording.events) and self._answers == self._recording.answers

    def _other_path(self, name: str) -> OtherPathError:
        events = self._recording.events
        expected = events[self._next_event].name if self._next_event < len(events) else "its end"
        return OtherPathError(
            f"pipeline: the forward came to {name} where it came to {expected} when it was recorded for inputs of "
            "these shapes and values; between layers, let nothing random choose the model's path."
        )


def _has_fakes(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return isinstance(tree, FakeTensor)
    if isinstance(tree, (tuple, list)):
        return any(_has_fakes(item) for item in tree)
    if isinstance(tree, dict):
        return any(_has_fakes(item) for item in tree.values())
    if tree is None or isinstance(tree, (int, float, str, torch.dtype, torch.device)):
        return False
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(tree))


def _has_tensor(tree: Any) -> bool:
    return isinstance(tree, Tensor) or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))
