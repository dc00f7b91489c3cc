"""What the monitors share: how Lightning counts steps, and where numbers go."""

from __future__ import annotations

from typing import Any

import torch


def num_steps(trainer: Any, module: Any) -> int:
    """Batches after which an optimizer stepped, as Lightning numbers what it logs; of all runs that were resumed."""
    # With manual optimization the global step counts the steps of every optimizer.
    return trainer.global_step if module.automatic_optimization else trainer.fit_loop.total_batch_idx + 1


def log(trainer: Any, metrics: dict[str, float], step: int) -> None:
    """Give numbers, equal on all ranks, to the loggers and to `callback_metrics`, unrounded."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step - 1)
    trainer.callback_metrics.update({name: torch.tensor(float(v), dtype=torch.float64) for name, v in metrics.items()})


def refuse_below_one(who: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{who} got {name}={value!r}; pass a number of steps from 1 on.")
