"""Helpers of the callbacks: the number of steps as Lightning counts them, logging, checks and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def num_steps(trainer: Any, module: Any) -> int:
    """Return the number of steps as Lightning's loggers count them; a resumed run continues the count.

    Automatic optimization: the optimizer steps; manual: the batches.
    """
    # With manual optimization, Lightning's global step counts the steps of all optimizers.
    count: int = trainer.global_step if module.automatic_optimization else trainer.fit_loop.total_batch_idx + 1
    return count


def log(trainer: Any, metrics: dict[str, float], step: int) -> None:
    """Write numbers, which must be equal on all ranks, to the loggers and `callback_metrics`, unrounded."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step - 1)
    trainer.callback_metrics.update({name: torch.tensor(float(v), dtype=torch.float64) for name, v in metrics.items()})


def check_at_least_one(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner} got {name}={value!r}; pass a number of steps from 1 on.")


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks for a message, such as "rank 0", "ranks 0 and 1" or, from `most` on, "ranks 0, 1, ... and 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:-1]]
    if len(ranks) > most:
        shown = [*shown[: most - 1], "..."]
    return f"ranks {', '.join(shown)} and {ranks[-1]}"
