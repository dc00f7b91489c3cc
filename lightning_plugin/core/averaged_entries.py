"""The entries of a Trainer's checkpoint that are states of a second model: the weights beside the average, or it.

Lightning's WeightAveraging saves the average as "state_dict", and the weights that are trained as
"current_model_state". StochasticWeightAveraging saves its average as "average_model_state" in its own state, one of the
"callbacks". A directory of shards has both like the model, under their own keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CURRENT = "current_model_state"
AVERAGE = "average_model_state"


def take_entries(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Remove the states of second models from a checkpoint, and return them by key.

    The states of callbacks are replaced by copies without them.
    """
    taken = {CURRENT: checkpoint.pop(CURRENT)} if CURRENT in checkpoint else {}
    for key, state in _states_with_average(checkpoint):
        if state[AVERAGE] is not None:
            taken[AVERAGE] = state[AVERAGE]
            checkpoint["callbacks"] = {**checkpoint["callbacks"], key: {**state, AVERAGE: None}}
    return taken


def put_entries(checkpoint: dict[str, Any], taken: dict[str, Any]) -> None:
    """Undo `take_entries`."""
    if CURRENT in taken:
        checkpoint[CURRENT] = taken[CURRENT]
    if AVERAGE in taken:
        for _, state in _states_with_average(checkpoint):
            state[AVERAGE] = taken[AVERAGE]


def _states_with_average(checkpoint: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, state in list(checkpoint.get("callbacks", {}).items()):
        if isinstance(state, dict) and AVERAGE in state:
            yield key, state
