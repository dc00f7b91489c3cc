"""Automatic cuts: the options of a pipeline that chooses its cuts, and the agreement of its ranks on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy._plan import Schedule, default_stages_per_rank
from weft.strategy.pipeline.choose import Choice, choose_cuts

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class AutoCuts:
    """Options for a pipeline that chooses its cuts; the text "auto" means `AutoCuts()`.

    stages_per_rank: None: 2 for the schedules "interleaved", "looped_bfs", "zbv", "dualpipev", "v_half" and "v_min", 1
        for other names; with a `Schedule`, the number that the schedule has.
    example: arguments of the model's forward for one micro-batch (a tuple of positional arguments, a dict of keywords,
        or the only argument). Stages are balanced by the floating-point operations of this call, and its activations
        count towards `memory_limit`.
        None: the Trainer uses the LightningModule's `example_input_array`. Without that array, and in Fabric and plain
        PyTorch, stages are balanced by their layers' parameters, except those of embeddings.
    memory_limit: the largest number of bytes of a rank. None: the memory of the first rank's CUDA device, which is
        ignored if no cuts satisfy it; no limit on CPU.
    state_factor: bytes of parameters, gradients and optimizer states for each byte of parameters; 4 is Adam's.

    Raises:
        ValueError: a number is below 1.
    """

    stages_per_rank: int | None = None
    example: Any = None
    memory_limit: int | None = None
    state_factor: float = 4.0

    def __post_init__(self) -> None:
        for name in ("stages_per_rank", "memory_limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"AutoCuts got {name}={value!r}; pass a whole number from 1 on, or None.")
        if not self.state_factor >= 1:
            raise ValueError(f"AutoCuts got state_factor={self.state_factor!r}; pass a number from 1 on.")


def auto_of(cuts: Any) -> AutoCuts | None:
    """Return the options for choosing cuts; None: `cuts` are names."""
    if isinstance(cuts, str) and cuts == AUTO:
        return AutoCuts()
    return cuts if isinstance(cuts, AutoCuts) else None


def num_stages_of(auto: AutoCuts, schedule: str | Schedule, num_ranks: int) -> int:
    """Return the number of stages for `num_ranks` ranks.

    Raises:
        ValueError: a `Schedule` has another number of stages than `auto.stages_per_rank` gives, or the named schedule
            does not support this number of stages per rank.
    """
    if isinstance(schedule, str):
        per_rank = default_stages_per_rank(schedule) if auto.stages_per_rank is None else auto.stages_per_rank
        Schedule.generate(schedule, num_ranks, num_ranks, per_rank)  # raises for an unsupported number
        return num_ranks * per_rank
    if auto.stages_per_rank is not None and auto.stages_per_rank * num_ranks != schedule.num_stages:
        raise ValueError(
            f"pipeline: stages_per_rank={auto.stages_per_rank} makes {auto.stages_per_rank * num_ranks} stages on "
            f"{num_ranks} ranks, and the schedule has {schedule.num_stages}; leave stages_per_rank out."
        )
    return schedule.num_stages


def call_with(function: Callable[..., Any], example: Any) -> Any:
    """Call a function with an example's arguments: a dict of keywords, a tuple, or the only argument."""
    if isinstance(example, dict):
        return function(**example)
    return function(*example) if isinstance(example, tuple) else function(example)


def agree_on_cuts(
    model: nn.Module,
    mesh: DeviceMesh,
    auto: AutoCuts,
    schedule: str | Schedule,
    *,
    num_ranks: int,
    num_micro_batches: int,
    device: torch.device,
    forward: Callable[[], Any] | None = None,
    parameter_shards: int = 1,
) -> Choice:
    """Return the cuts that the mesh's first rank chooses, the same on all ranks of the mesh; collective.

    Args:
        model: full, on every rank.
        mesh: the ranks that must agree.
        auto: the options.
        schedule, num_ranks, num_micro_batches: of the pipeline.
        device: of this rank; the memory of a CUDA device is the limit if `auto` has none, and is ignored if no cuts
            satisfy it, because the memory of training is an estimate.
        forward: calls the model once, as for a micro-batch; used if `auto` has no example. If the operations of the
            call cannot be counted, the cuts balance parameters.
        parameter_shards: the number of ranks over which the parameters of a stage are sharded.

    Raises:
        ValueError: see `num_stages_of`; or the first rank cannot choose cuts, for any reason (see `choose_cuts`).
    """
    num_stages_of(auto, schedule, num_ranks)  # raises the same error on all ranks
    outcome: list[Any] = [None]
    if not any(mesh.get_coordinate() or ()):
        try:
            choice = cuts_on_first_rank(
                model,
                auto,
                schedule,
                num_ranks=num_ranks,
                num_micro_batches=num_micro_batches,
                device=device,
                forward=forward,
                parameter_shards=parameter_shards,
            )
            outcome = [(choice, "")]
        except Exception as error:  # any error must reach the other ranks, which wait for an answer
            outcome = [(None, str(error))]
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.broadcast_object_list(outcome, group=mesh.get_group(axis), group_src=0)
    chosen: Choice | None
    chosen, reason = outcome[0]
    if chosen is None:
        raise ValueError(reason)
    return chosen


def cuts_on_first_rank(
    model: nn.Module,
    auto: AutoCuts,
    schedule: str | Schedule,
    *,
    num_ranks: int,
    num_micro_batches: int,
    device: torch.device,
    forward: Callable[[], Any] | None = None,
    parameter_shards: int = 1,
) -> Choice:
    """Return the cuts that the first rank chooses, without communication; see `agree_on_cuts`.

    Raises:
        ValueError: see `num_stages_of` and `choose_cuts`.
    """
    num_stages = num_stages_of(auto, schedule, num_ranks)
    per_rank = num_stages // num_ranks
    generated = schedule
    if isinstance(generated, str):
        generated = Schedule.generate(generated, num_ranks, num_micro_batches, per_rank)
    limit = _bytes_of(device) if auto.memory_limit is None else auto.memory_limit
    has_example = auto.example is not None
    return choose_cuts(
        model,
        num_stages,
        forward=(lambda: call_with(model, auto.example)) if has_example else forward,
        forward_may_fail=not has_example,
        in_flight=generated.simulate().in_flight,
        state_factor=auto.state_factor / parameter_shards,
        memory_limit=None if limit is None else limit // per_rank,
        limit_may_fail=auto.memory_limit is None,
    )


def _bytes_of(device: torch.device) -> int | None:
    """Return the memory of a CUDA device; None for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
