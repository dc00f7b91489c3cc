"""ZeRO stage 1: each data-parallel rank steps a slice of every parameter, and holds the states of that slice."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from weft.strategy.data_parallel.local import local_part

# Exactly these classes: they update an element from that element's gradients alone.
_CLASSES = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
_GATHER_BYTES = 25 << 20

_known: weakref.WeakKeyDictionary[Optimizer, ShardedStates] = weakref.WeakKeyDictionary()


def steps_elements_alone(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step each element by that element's gradients alone."""
    return type(optimizer) in _CLASSES


def sharded_states_of(optimizer: Optimizer) -> ShardedStates | None:
    """Return the ShardedStates of an optimizer; None: its states are not sharded."""
    return _known.get(optimizer)


class ShardedStates:
    """Makes an optimizer step this rank's slice of each parameter, and gathers the slices after the step.

    The ranks of the group hold equal local parameters and equal gradients. A slice is a view of consecutive elements of
    the local parameter, equally many on each rank except for the last ranks. The optimizer object stays the user's:
    during a step, a load or a save its groups list the slices; at any other time they list the parameters. The options
    of its groups are never changed.
    """

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup, gather_bytes: int = _GATHER_BYTES) -> None:
        """
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
        self._gather_bytes = gather_bytes
        self._slices: dict[Tensor, Tensor] = {}
        self._lists: list[list[Tensor]] | None = None  # the groups' parameters, while slices replace them
        _known[optimizer] = self
        self._cut_states(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))
        optimizer.register_state_dict_pre_hook(self._show_slices)
        optimizer.register_state_dict_post_hook(lambda optimizer, _: self._show_parameters(optimizer))
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: self._show_slices(optimizer))
        optimizer.register_load_state_dict_post_hook(self._show_parameters)

    def _cut_states(self, optimizer: Optimizer) -> None:
        """Shard existing states: Adagrad creates its states at once."""
        for parameter in list(optimizer.state):
            shape = parameter.shape
            values = optimizer.state.pop(parameter)
            optimizer.state[self._slice_of(parameter)] = {
                name: self.own_slice(parameter, local_part(value)).clone() if is_like(name, value, shape) else value
                for name, value in values.items()
            }

    def own_slice(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return this rank's slice of a value for the local part of `parameter`; flat, a view if possible."""
        start, stop = self._range(parameter, self._group.rank())
        return _flat(_laid_out_like(value, parameter))[start:stop]

    def whole(self, parameter: Tensor, slice_: Tensor) -> Tensor:
        """Return a tensor like `parameter`, gathered from the ranks' slices; collective."""
        local = torch.empty_like(local_part(parameter), dtype=slice_.dtype)
        size = self._chunk(parameter)
        padded = slice_.new_zeros(size)
        padded[: slice_.numel()] = slice_
        gathered = slice_.new_empty(size * self._group.size())
        dist.all_gather_into_tensor(gathered, padded, group=self._group)
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

    def _chunk(self, parameter: Tensor) -> int:
        return -(-local_part(parameter).numel() // self._group.size())

    def _range(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        numel, size = local_part(parameter).numel(), self._chunk(parameter)
        return min(rank * size, numel), min((rank + 1) * size, numel)

    def _slice_of(self, parameter: Tensor) -> Tensor:
        known = self._slices.get(parameter)
        local = local_part(parameter)
        if known is None or known.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
            made = torch.nn.Parameter(self.own_slice(parameter, local), requires_grad=parameter.requires_grad)
            if known is None:
                self._slices[parameter] = known = made
            known.data = made.data  # the keys of the optimizer's states are these objects
        return known

    def _show_slices(self, optimizer: Optimizer) -> None:
        if self._lists is None:
            self._lists = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [self._slice_of(parameter) for parameter in group["params"]]

    def _show_parameters(self, optimizer: Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._lists or (), strict=bool(self._lists)):
            group["params"] = parameters
        self._lists = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Call a closure, which computes gradients, with the parameters in the groups; the step itself uses slices."""
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
        self._show_slices(optimizer)
        for parameter in self._each():
            grad = None if parameter.grad is None else local_part(parameter.grad)
            self._slices[parameter].grad = None if grad is None else self.own_slice(parameter, grad)

    def _end_step(self, optimizer: Optimizer) -> None:
        stepped = [p for p in self._each() if p.grad is not None]
        for parameter in stepped:
            self._slices[parameter].grad = None
        self._show_parameters(optimizer)
        with torch.no_grad():
            self._gather(stepped)

    def _each(self) -> Iterable[Tensor]:
        return (parameter for parameters in self._lists or () for parameter in parameters)

    def _gather(self, parameters: list[Tensor]) -> None:
        """All-gather the stepped slices of all ranks: large parameters in place, others together."""
        together: list[Tensor] = []
        used = 0
        for parameter in parameters:
            flat = _flat(local_part(parameter))
            if flat.nbytes >= self._gather_bytes and flat.numel() % self._group.size() == 0:
                dist.all_gather_into_tensor(flat, self._slices[parameter].detach().clone(), group=self._group)
                continue
            if together and (used + flat.nbytes > self._gather_bytes or flat.dtype != _dtype(together[0])):
                self._gather_together(together)
                together, used = [], 0
            together.append(parameter)
            used += flat.nbytes
        if together:
            self._gather_together(together)

    def _gather_together(self, parameters: list[Tensor]) -> None:
        sizes = [self._chunk(parameter) for parameter in parameters]
        mine = local_part(parameters[0]).new_zeros(sum(sizes))
        for part, parameter in zip(mine.split(sizes), parameters, strict=True):
            slice_ = self._slices[parameter].detach()
            part[: slice_.numel()] = slice_
        gathered = mine.new_empty(self._group.size(), mine.numel())
        dist.all_gather_into_tensor(gathered.view(-1), mine, group=self._group)
        for rank, row in enumerate(gathered):
            if rank == self._group.rank():
                continue
            for part, parameter in zip(row.split(sizes), parameters, strict=True):
                start, stop = self._range(parameter, rank)
                _flat(local_part(parameter))[start:stop] = part[: stop - start]


def is_like(name: str, value: object, shape: torch.Size) -> bool:
    """Return whether a state has an element for each element of a parameter of this shape; a step count does not."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or name != "step")


def _dtype(parameter: Tensor) -> torch.dtype:
    return local_part(parameter).dtype


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, for a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    local = local_part(parameter)
    return value if value.stride() == local.stride() else torch.empty_like(local, dtype=value.dtype).copy_(value)
