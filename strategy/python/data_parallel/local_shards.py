"""The shards of a model as plain tensors, and their average, which needs no communication."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from weft.strategy.data_parallel.fully_sharded import free_gathered
from weft.strategy.data_parallel.local import local_shard


class LocalShards(nn.Module):
    """This rank's shards of a model's parameters and buffers, as plain tensors, in the model's order.

    They share the model's memory.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: sharded or not. Parameters that FSDP2 has gathered for a forward are freed.
        """
        super().__init__()
        free_gathered(model)
        for idx, parameter in enumerate(model.parameters()):
            shard = nn.Parameter(local_shard(parameter), requires_grad=parameter.requires_grad)
            self.register_parameter(f"parameter_{idx}", shard)
        for idx, buffer in enumerate(model.buffers()):
            self.register_buffer(f"buffer_{idx}", local_shard(buffer))

    def copy(self) -> LocalShards:
        """Return a copy, which has memory of its own."""
        copied = LocalShards(nn.Module())
        for name, parameter in self.named_parameters():
            shard = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            copied.register_parameter(name, shard)
        for name, buffer in self.named_buffers():
            copied.register_buffer(name, buffer.clone())
        return copied

    @torch.no_grad()
    def copy_from(self, other: LocalShards) -> None:
        """Copy the values of `other`; raises ValueError if it has other shards."""
        for mine, value in self._paired_with(other):
            mine.copy_(value)

    @torch.no_grad()
    def swap_with(self, other: LocalShards) -> None:
        """Exchange the values with `other`, one tensor at a time; raises ValueError if it has other shards."""
        for mine, value in self._paired_with(other):
            kept = mine.clone()
            mine.copy_(value)
            value.copy_(kept)

    def _paired_with(self, other: LocalShards) -> Iterator[tuple[Tensor, Tensor]]:
        mine, values = ([*shards.parameters(), *shards.buffers()] for shards in (self, other))
        shapes, other_shapes = ([tuple(each.shape) for each in tensors] for tensors in (mine, values))
        if shapes != other_shapes:
            raise ValueError(
                f"got a model with {len(values)} parameters and buffers on this rank, and expected the {len(mine)} of "
                "its average, with equal shapes; neither add nor shard layers after the start of training."
            )
        return zip(mine, values, strict=True)


class ShardAverage(AveragedModel):
    """torch's AveragedModel of `LocalShards`: `update_parameters` takes the sharded model itself."""

    def update_parameters(self, model: nn.Module) -> None:
        """Average this rank's shards of the model, which has the layout that it had at the start; no communication."""
        super().update_parameters(LocalShards(model))
