"""The table that 03_train_text.py prints for runs on several device counts, and the limits that it checks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

FIRST_STEPS, FIRST_RELATIVE = 20, 1e-4  # allowed relative difference of the first losses between two runs
LAST_STEPS, LAST_ABSOLUTE = 20, 0.02  # allowed absolute difference of the last losses
LOSS_LIMIT, LOSS_SECONDS = 2.6, 180.0  # nats per byte, to be reached within these seconds
LOSS_WINDOW = 20  # steps over which a loss is averaged before it is compared with LOSS_LIMIT
LOSS_LIMIT_FROM_STEPS = 150  # shorter runs are smoke tests, whose loss is not checked


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        devices: the number of ranks.
        num_parameters, num_parameters_local: elements of all parameters, and of rank 0's shards of them.
        tokens_per_step: batch size times sequence length.
        losses: training loss of each step, nats per byte.
        seconds: from the start of training to the end of each step.
    """

    devices: int
    num_parameters: int
    num_parameters_local: int
    tokens_per_step: int
    losses: list[float]
    seconds: list[float]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Run:
        return cls(**json.loads(path.read_text()))

    @property
    def final_loss(self) -> float:
        """Return the mean loss of the last LOSS_WINDOW steps, because single batches are noisy."""
        last = self.losses[-LOSS_WINDOW:]
        return sum(last) / len(last)

    @property
    def tokens_per_second(self) -> float:
        """Return the speed without the first step, which includes setup, unless it is the only step."""
        if len(self.seconds) < 2:
            return self.tokens_per_step / self.seconds[-1]
        return self.tokens_per_step * (len(self.seconds) - 1) / (self.seconds[-1] - self.seconds[0])

    def step_below(self, limit: float) -> int | None:
        """Return the first step (from 1) after which the mean of the last LOSS_WINDOW losses is below `limit`."""
        for end in range(LOSS_WINDOW, len(self.losses) + 1):
            if sum(self.losses[end - LOSS_WINDOW : end]) / LOSS_WINDOW < limit:
                return end
        return None


def table(runs: list[Run]) -> str:
    """Return a table of device count, parameters per rank, loss and speed; for several runs, also of losses by step."""
    lines = [f"{'devices':>8} {'parameters per rank':>20} {'nats per byte':>14} {'tokens/s':>10} {'seconds':>8}"]
    for run in runs:
        lines.append(
            f"{run.devices:>8} {run.num_parameters_local:>20,} {run.final_loss:>14.4f} "
            f"{run.tokens_per_second:>10,.0f} {run.seconds[-1]:>8.1f}"
        )
    if len(runs) > 1:
        lines += ["", "loss at step " + "".join(f"{_devices(run.devices):>14}" for run in runs)]
        num_steps = len(runs[0].losses)
        for step in sorted({1, min(FIRST_STEPS, num_steps), *range(50, num_steps, 50), num_steps}):
            lines.append(f"{step:>12} " + "".join(f"{run.losses[step - 1]:>14.6f}" for run in runs))
    return "\n".join(lines)


def verdict(runs: list[Run]) -> tuple[list[str], bool]:
    """Return a line with the figure for each limit, and whether all limits hold. The first run is the reference."""
    lines, good = [], True
    for run in runs:
        if len(run.losses) >= LOSS_LIMIT_FROM_STEPS:
            step = run.step_below(LOSS_LIMIT)
            took = run.seconds[step - 1] if step is not None else None
            holds = took is not None and took <= LOSS_SECONDS
            when = f"after {step} steps and {took:.0f} s" if step is not None else "never"
            what = f"mean of {LOSS_WINDOW} losses below {LOSS_LIMIT}"
            lines.append(f"{_mark(holds)} {_devices(run.devices)}: {what} {when} (wanted within {LOSS_SECONDS:.0f} s)")
            good &= holds
    base = runs[0]
    for run in runs[1:]:
        pair = f"{_devices(run.devices)} against {base.devices}"
        pairs = list(zip(run.losses, base.losses, strict=True))
        first = [abs(a - b) / abs(b) for a, b in pairs[:FIRST_STEPS]]
        last = [abs(a - b) for a, b in pairs[-LAST_STEPS:]]
        for what, figures, limit in (
            (f"first {FIRST_STEPS} losses, largest relative difference", first, FIRST_RELATIVE),
            (f"last {LAST_STEPS} losses, largest difference", last, LAST_ABSOLUTE),
        ):
            holds = all(figure <= limit for figure in figures)  # false for a NaN, which max() may pass over
            lines.append(f"{_mark(holds)} {pair}: {what} {max(figures):.1e} (wanted at most {limit:g})")
            good &= holds
    return lines, good


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _mark(holds: bool) -> str:
    return "ok    " if holds else "FAILED"
