"""Steps the parameters of a rank's stages inside a schedule: each stage's after its last backward."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from weft.strategy._plan import Action
from weft.strategy.pipeline.staged_model import StagedModel

# The actions that may complete the gradients of a stage; a backward in halves ends with that of the weights.
_LAST_KINDS = ("B", "W")


class Stepper(Protocol):
    """The members of `weft.strategy.StepInBackward` that a schedule uses."""

    @property
    def parameters(self) -> Collection[Tensor]: ...
    @property
    def is_accumulating(self) -> bool: ...
    @property
    def num_stepped(self) -> int: ...
    @property
    def stepped_by_rows(self) -> list[str]: ...
    def stepping_only(self, parameters: Collection[Tensor]) -> contextlib.AbstractContextManager[None]: ...
    def step_gradients(self, parameters: Iterable[Tensor] | None = None) -> None: ...


class StepsInBackward:
    """Steps in one run of a schedule.

    All backwards of a stage but the last accumulate gradients. The last one steps each parameter of the stage as soon
    as its gradient is complete, and frees the gradient. Fully sharded parameters are stepped unit by unit, when FSDP2
    reduces the gradients of all micro-batches. Copies of tied parameters, and parameters of several stages of this
    rank, keep their gradients, which are not complete.

    Args:
        stepper: steps the optimizer of the model in stages.
        staged: this rank's stages.
        actions: this rank's actions.
        is_fully_sharded: whether gradients are complete only when all micro-batches are reduced.
    """

    def __init__(
        self, stepper: Stepper, staged: StagedModel, actions: Sequence[Action], is_fully_sharded: bool
    ) -> None:
        self._stepper = stepper
        # An accumulating batch steps nothing, so its actions need no order.
        self._is_active = not stepper.is_accumulating
        self._last = {a.stage: a for a in actions if a.kind in _LAST_KINDS} if self._is_active else {}
        # The parameters whose gradients the last backward of a stage completes, and those whose gradients FSDP2 does.
        self._own: dict[int, set[nn.Parameter]] = {stage: set() for stage in staged.stages}
        stages_of = staged.stages_of_parameters() if self._is_active else {}
        shared = {parameter for parameter, stages in stages_of.items() if len(stages) > 1}
        self._reduced = set(stepper.parameters) - shared
        if not is_fully_sharded:
            for parameter in stages_of.keys() - shared:
                self._own[min(stages_of[parameter])].add(parameter)

    @contextlib.contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Run one action inside."""
        is_last = self._is_active and self._last.get(action.stage) == action
        own = self._own[action.stage] if is_last else set()
        with self._stepper.stepping_only(own):
            yield
            if is_last:  # the gradients that the backward's first half has accumulated, see `backward_input`
                self._stepper.step_gradients(own)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Inside, FSDP2 reduces the gradients of its units, which are stepped one unit after another."""
        with self._stepper.stepping_only(self._reduced):
            yield


def check_can_step(stepper: Stepper) -> None:
    """Raise an error for a stepper that cannot step in a schedule now; a rank that steps nothing does not notice.

    Raises:
        ValueError: it steps rows, which takes one backward for all samples of a step.
        RuntimeError: it has stepped already since the optimizer's `step()`.
    """
    if stepper.stepped_by_rows:
        raise ValueError(
            "pipeline: the StepInBackward steps rows, and a stage accumulates full gradients over micro-batches; "
            "create it without by_rows."
        )
    if stepper.num_stepped and not stepper.is_accumulating:
        raise RuntimeError(
            f"pipeline: {stepper.num_stepped} parameters were stepped by an earlier batch since the optimizer's "
            "step(); call step() after each batch, or accumulate batches inside of accumulating()."
        )
