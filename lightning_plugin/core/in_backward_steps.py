"""Runs an optimizer inside the backward, on gradients that are averaged and clipped one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft.strategy import StepInBackward


class InBackwardSteps:
    """Makes one optimizer of a strategy step inside the backward, from `start` until `stop`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stepper: StepInBackward | None = None

    @property
    def is_active(self) -> bool:
        return self._stepper is not None

    @property
    def num_stepped(self) -> int:
        """Return the number of parameters that the current step's backward has updated so far; 0 between steps."""
        return 0 if self._stepper is None else self._stepper.num_stepped

    def start(self, module: nn.Module, optimizer: Optimizer, clip_value: float | None = None) -> None:
        """Make the optimizer step in the module's backwards; clip gradients to +-`clip_value` first, unless None."""
        from weft.strategy import StepInBackward

        engine = self._engine

        def before_step(parameter: Tensor) -> None:
            engine.first_gradients.record(parameter)
            engine.data_axes.average(parameter)
            if clip_value is not None:
                gradient = parameter.grad
                assert gradient is not None
                getattr(gradient, "_local_tensor", gradient).clamp_(-clip_value, clip_value)

        self.stop()
        steps_rows = engine.options.optimizer_in_backward == "rows"
        self._stepper = StepInBackward(module, optimizer, before_step, steps_rows)
        if steps_rows:
            names = self._stepper.stepped_by_rows
            engine.console.log(
                f"weft steps {len(names)} weights of fused MLPs some rows at a time, from '{names[0]}' on."
            )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backwards only accumulate gradients."""
        with nullcontext() if self._stepper is None else self._stepper.accumulating():
            yield

    def stop(self) -> None:
        if self._stepper is not None:
            self._stepper.remove()
        self._stepper = None
