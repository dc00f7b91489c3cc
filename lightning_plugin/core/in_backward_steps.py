"""Runs an optimizer inside the backward, on gradients that are averaged and clipped one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        self.clip_norm: float | None = None  # given to `start`

    @property
    def stepper(self) -> StepInBackward | None:
        """Return what steps the optimizer; None: it does not step inside the backward."""
        return self._stepper

    @property
    def is_active(self) -> bool:
        return self._stepper is not None

    @property
    def num_stepped(self) -> int:
        """Return the number of parameters that the current step's backward has updated so far; 0 between steps."""
        return 0 if self._stepper is None else self._stepper.num_stepped

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_value: float | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Make the optimizer step in the module's backwards.

        clip_value: clip gradients to +-`clip_value` first, unless None.
        clip_norm: the norm to which `backward` clips all gradients, unless None.
        """
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
        self.clip_norm = clip_norm
        steps_rows = engine.options.optimizer_in_backward == "rows"
        self._stepper = StepInBackward(module, optimizer, before_step, steps_rows)
        if steps_rows:
            names = self._stepper.stepped_by_rows
            engine.console.log(
                f"weft steps {len(names)} weights of fused MLPs some rows at a time, from '{names[0]}' on."
            )

    def backward(self, run: Callable[[bool], object]) -> Tensor | None:
        """Run a backward, once or twice; return the gradients' norm before clipping by norm, or None without it.

        `run`: runs the backward; its argument tells whether to retain the graph.
        """
        stepper = self._stepper
        if stepper is None or self.clip_norm is None or stepper.is_accumulating:
            run(False)
            return None
        return stepper.clipped_backward(run, self.clip_norm)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backwards only accumulate gradients."""
        with nullcontext() if self._stepper is None else self._stepper.accumulating():
            yield

    def stop(self) -> None:
        if self._stepper is not None:
            self._stepper.remove()
        self._stepper = self.clip_norm = None
