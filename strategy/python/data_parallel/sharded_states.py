"""ZeRO stage 1: each data-parallel rank steps a flat shard of each parameter, and stores the states of that shard."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from weft.strategy.data_parallel.local import local_shard
from weft.strategy.data_parallel.replica_groups import ReplicaGroups

# Exactly these classes: they update an element from that element's gradients alone.
_CLASSES = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
_GATHER_BYTES = 25 << 20

_instances: weakref.WeakKeyDictionary[Optimizer, ShardedStates] = weakref.WeakKeyDictionary()


def steps_elements_alone(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step each element by that element's gradients alone."""
    return type(optimizer) in _CLASSES


def sharded_states_of(optimizer: Optimizer) -> ShardedStates | None:
    """Return the ShardedStates of an optimizer; None: its states are not sharded."""
    return _instances.get(optimizer)


class ShardedStates:
    """Makes an optimizer step this rank's flat shard of each parameter, and gathers the shards after the step.

    The ranks of the group hold equal local parameters and equal gradients. A flat shard is a view of consecutive
    elements of the local parameter, equally many on each rank except for the last ranks. The optimizer object stays the
    user's: during a step (after its closure), a load or a save its groups list the shards; at any other time they list
    the parameters. The options of its groups are never changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        gather_bytes: int = _GATHER_BYTES,
        experts: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            experts: the ranks of `group` that hold the same experts, for parameters on the axis expert_parallel.

        Raises:
            ValueError: the optimizer is not known to step each element alone.
        """
        if not steps_elements_alone(optimizer):
            names = ", ".join(cls.__name__ for cls in _CLASSES)
            raise ValueError(
                f"zero_stage=1: {type(optimizer).__name__} is not known to step each element of a parameter alone, as "
                f"{names} do; pass zero_stage=0, 2 or 3."
            )
        self._group = group
        self._groups = ReplicaGroups(group, experts)
        self._gather_bytes = gather_bytes
        self._flat_shards: dict[Tensor, Tensor] = {}
        # The parameters of each group of the optimizer, while its groups list flat shards; else None.
        self._group_parameters: list[list[Tensor]] | None = None
        _instances[optimizer] = self
        self._shard_states(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))
        optimizer.register_state_dict_pre_hook(self._list_flat_shards)
        optimizer.register_state_dict_post_hook(lambda optimizer, _: self._restore_parameters(optimizer))
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: self._list_flat_shards(optimizer))
        optimizer.register_load_state_dict_post_hook(self._restore_parameters)

    def _shard_states(self, optimizer: Optimizer) -> None:
        """Shard existing states: Adagrad creates its states in its constructor."""
        for parameter in list(optimizer.state):
            shape = parameter.shape
            values = optimizer.state.pop(parameter)
            optimizer.state[self._flat_shard_of(parameter)] = {
                name: self.local_flat_shard(parameter, local_shard(value)).clone()
                if is_elementwise_state(name, value, shape)
                else value
                for name, value in values.items()
            }

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group over whose ranks the states are sharded, but for those of experts."""
        return self._group

    def group_of(self, parameter: Tensor) -> dist.ProcessGroup:
        """Return the group over whose ranks the states of a parameter are sharded."""
        return self._groups.of(parameter)

    def flat_shard_of(self, parameter: Tensor) -> Tensor | None:
        """Return the flat shard that is a parameter's key in the optimizer's `state`; None: there is none yet."""
        return self._flat_shards.get(parameter)

    def local_flat_shard(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return this rank's flat shard of `value`, shaped as `parameter`'s local shard; a view if possible."""
        start, stop = self._flat_shard_range(parameter, self._groups.of(parameter).rank())
        return _flat(_with_layout_of(value, parameter))[start:stop]

    def gather_full(self, parameter: Tensor, flat_shard: Tensor) -> Tensor:
        """Return a tensor like `parameter`, gathered from the ranks' flat shards; collective."""
        local = torch.empty_like(local_shard(parameter), dtype=flat_shard.dtype)
        size = self._flat_shard_size(parameter)
        padded = flat_shard.new_zeros(size)
        padded[: flat_shard.numel()] = flat_shard
        group = self._groups.of(parameter)
        gathered = flat_shard.new_empty(size * group.size())
        dist.all_gather_into_tensor(gathered, padded, group=group)
        _flat(local).copy_(gathered[: local.numel()])
        if not isinstance(parameter, DTensor):
            return local
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _flat_shard_size(self, parameter: Tensor) -> int:
        return -(-local_shard(parameter).numel() // self._groups.of(parameter).size())

    def _flat_shard_range(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        numel, size = local_shard(parameter).numel(), self._flat_shard_size(parameter)
        return min(rank * size, numel), min((rank + 1) * size, numel)

    def _flat_shard_of(self, parameter: Tensor) -> Tensor:
        cached = self._flat_shards.get(parameter)
        local = local_shard(parameter)
        if cached is None or cached.untyped_storage()._cdata != local.untyped_storage()._cdata:
            made = torch.nn.Parameter(self.local_flat_shard(parameter, local), requires_grad=parameter.requires_grad)
            if cached is None:
                self._flat_shards[parameter] = cached = made
            cached.data = made.data  # the same object, because the optimizer's states have it as a key
        return cached

    def _list_flat_shards(self, optimizer: Optimizer) -> None:
        if self._group_parameters is None:
            self._group_parameters = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [self._flat_shard_of(parameter) for parameter in group["params"]]

    def _restore_parameters(self, optimizer: Optimizer) -> None:
        for group, parameters in zip(
            optimizer.param_groups, self._group_parameters or (), strict=bool(self._group_parameters)
        ):
            group["params"] = parameters
        self._group_parameters = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Put flat shards into the groups before the step, but after its closure, if any, which computes gradients.

        Returns:
            The arguments of the step with another closure, which calls the user's; None: no closure, no change.
        """
        _, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self._begin_step(optimizer)
            return None

        def closure_and_begin() -> Any:
            result = closure()
            self._begin_step(optimizer)
            return result

        if rest:
            return (args[0], closure_and_begin, *rest[1:]), kwargs
        return args, {**kwargs, "closure": closure_and_begin}

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._list_flat_shards(optimizer)
        for parameter in self._replaced_parameters():
            grad = None if parameter.grad is None else local_shard(parameter.grad)
            self._flat_shards[parameter].grad = None if grad is None else self.local_flat_shard(parameter, grad)

    def _end_step(self, optimizer: Optimizer) -> None:
        stepped = [p for p in self._replaced_parameters() if p.grad is not None]
        for parameter in stepped:
            self._flat_shards[parameter].grad = None
        self._restore_parameters(optimizer)
        with torch.no_grad():
            self._all_gather(stepped)

    def _replaced_parameters(self) -> Iterable[Tensor]:
        return (parameter for parameters in self._group_parameters or () for parameter in parameters)

    def _all_gather(self, parameters: list[Tensor]) -> None:
        """All-gather the stepped shards of all ranks: large parameters that divide evenly in place, others packed."""
        by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        for parameter in parameters:
            by_group.setdefault(self._groups.of(parameter), []).append(parameter)
        for group, of_group in by_group.items():
            if group.size() > 1:
                self._all_gather_over(group, of_group)

    def _all_gather_over(self, group: dist.ProcessGroup, parameters: list[Tensor]) -> None:
        packed: list[Tensor] = []
        used = 0
        for parameter in parameters:
            flat = _flat(local_shard(parameter))
            if flat.nbytes >= self._gather_bytes and flat.numel() % group.size() == 0:
                dist.all_gather_into_tensor(flat, self._flat_shards[parameter].detach().clone(), group=group)
                continue
            if packed and (used + flat.nbytes > self._gather_bytes or flat.dtype != _dtype(packed[0])):
                self._all_gather_packed(group, packed)
                packed, used = [], 0
            packed.append(parameter)
            used += flat.nbytes
        if packed:
            self._all_gather_packed(group, packed)

    def _all_gather_packed(self, group: dist.ProcessGroup, parameters: list[Tensor]) -> None:
        sizes = [self._flat_shard_size(parameter) for parameter in parameters]
        send_buffer = local_shard(parameters[0]).new_zeros(sum(sizes))
        for segment, parameter in zip(send_buffer.split(sizes), parameters, strict=True):
            flat_shard = self._flat_shards[parameter].detach()
            segment[: flat_shard.numel()] = flat_shard
        gathered = send_buffer.new_empty(group.size(), send_buffer.numel())
        dist.all_gather_into_tensor(gathered.view(-1), send_buffer, group=group)
        for rank, row in enumerate(gathered):
            if rank == group.rank():
                continue
            for segment, parameter in zip(row.split(sizes), parameters, strict=True):
                start, stop = self._flat_shard_range(parameter, rank)
                _flat(local_shard(parameter))[start:stop] = segment[: stop - start]


def is_elementwise_state(name: str, value: object, shape: torch.Size) -> bool:
    """Return whether a state has an element for each element of a parameter of this shape; a step count does not."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or name != "step")


def _dtype(parameter: Tensor) -> torch.dtype:
    return local_shard(parameter).dtype


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, for a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _with_layout_of(value: Tensor, parameter: Tensor) -> Tensor:
    local = local_shard(parameter)
    return value if value.stride() == local.stride() else torch.empty_like(local, dtype=value.dtype).copy_(value)
