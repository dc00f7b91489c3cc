"""Sums gradients of parameters that layers of several stages share, such as an embedding tied to the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft import ops
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.pipeline.staged_model import StagedModel

_CHANNEL = 0  # the boundaries' channels begin at 2


class TiedGradients:
    """The gradients of this rank's copies of tied parameters in one step.

    Create it before the step. It sets aside the gradients of earlier steps, which are sums over all stages already.
    """

    def __init__(self, staged: StagedModel, rank_of: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group = group
        self._copies: list[tuple[nn.Parameter, list[int], Tensor | None]] = []
        for tied in staged.tied:
            ranks = sorted({rank_of[stage] for stage in tied.name_on})
            if group.rank() not in ranks or len(ranks) == 1:
                continue
            name = next(tied.name_on[stage] for stage in staged.stages if stage in tied.name_on)
            parameter = _parameter(staged, name)
            if parameter.requires_grad:
                self._copies.append((parameter, ranks, parameter.grad))
                parameter.grad = None

    def sum_over_stages(self) -> None:
        """Sum the gradients of all copies of a parameter in this step, and add earlier gradients; collective.

        Every rank with a copy sends its gradient to all other ranks with a copy. Each of these ranks adds the gradients
        in the order of the ranks: the sums are equal bit by bit.
        """
        for parameter, ranks, earlier in self._copies:
            _sum_over_ranks(parameter, ranks, self._group)
            if earlier is not None:
                assert parameter.grad is not None
                with torch.no_grad():
                    local_shard(earlier).add_(local_shard(parameter.grad))
                parameter.grad = earlier
        self._copies.clear()


def check_equal_shards(staged: StagedModel, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on all ranks, if stages shard their copies of a parameter differently; collective."""
    if not staged.tied:
        return
    local_copies = {}
    for tied in staged.tied:
        first = tied.name_on[min(tied.name_on)]
        for stage in sorted(set(staged.stages) & tied.name_on.keys()):
            parameter = _parameter(staged, tied.name_on[stage])
            local_copies[first] = (tied.name_on[stage], str(getattr(parameter, "placements", "no shards")))
    gathered: list[dict[str, tuple[str, str]]] = [{}] * group.size()
    dist.all_gather_object(gathered, local_copies, group=group)
    for tied in staged.tied:
        first = tied.name_on[min(tied.name_on)]
        copies = [each[first] for each in gathered if first in each]
        for name, placements in copies:
            if placements != copies[0][1]:
                raise ValueError(
                    f"pipeline: '{copies[0][0]}' and '{name}' are copies of one tied parameter with the placements "
                    f"{copies[0][1]} and {placements}; give their modules rules that agree, or put them on one stage."
                )


def secondary_copies(staged: StagedModel) -> list[nn.Parameter]:
    """Return this rank's copies of tied parameters whose first copy is on another rank."""
    copies = []
    for tied in staged.tied:
        local_stages = [stage for stage in staged.stages if stage in tied.name_on]
        if local_stages and min(tied.name_on) not in staged.stages:
            copies.append(_parameter(staged, tied.name_on[local_stages[0]]))
    return copies


def _parameter(staged: StagedModel, name: str) -> nn.Parameter:
    """Return the parameter itself, even inside `local_parameters`, where modules' attributes are local tensors."""
    module, _, attribute = name.rpartition(".")
    parameter = staged.model.get_submodule(module)._parameters[attribute]
    assert parameter is not None
    return parameter


def _sum_over_ranks(parameter: nn.Parameter, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
    """Replace a gradient by its sum over `ranks`, added in the order of `ranks` on each; collective over `ranks`."""
    local = local_shard(parameter.grad) if parameter.grad is not None else torch.zeros_like(local_shard(parameter))
    others = [rank for rank in ranks if rank != group.rank()]
    like = torch.empty((), dtype=local.dtype, device=local.device).expand(local.shape)
    tokens = [ops.pipeline_recv([like], rank, _CHANNEL, group.group_name) for rank in others]
    copy = local.clone()  # a sent tensor must not change while it is in flight
    for rank in others:
        ops.pipeline_send([copy], rank, _CHANNEL, group.group_name)
    by_rank: dict[int, Tensor] = {group.rank(): copy}
    for rank, token in zip(others, tokens, strict=True):
        [by_rank[rank]] = ops.pipeline_wait(token)
    total = by_rank[ranks[0]].clone()
    for rank in ranks[1:]:
        total += by_rank[rank]
    ops.pipeline_flush(group.group_name)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        local_shard(parameter.grad).copy_(total)
