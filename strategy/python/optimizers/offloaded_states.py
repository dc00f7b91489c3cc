"""Keeps the states of an optimizer on a disk: memory-mapped, read before their parameter's step and written behind it.

The states are ordinary tensors whose memory is a file's, so that checkpoints, hashes and steps by rows see no
difference, and the kernels of the steps stay the same: results are equal to the bit. An optimizer steps one parameter
at a time. Before a step it starts to read the states of the parameter that came next in the step before, and after the
step it starts to write the new states. In the time between, the backward or other steps run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.low_precision import (
    LowPrecisionAdam,
    LowPrecisionAdamW,
    LowPrecisionOptimizer,
    LowPrecisionSGD,
)
from weft.strategy.optimizers.state_file import Region, StateFile
from weft.strategy.optimizers.state_format import LOW_BITS, SCALE

DISK = "disk:"
# Smaller states stay in memory: they would take a page each, and more time to advise the kernel than to step.
MIN_BYTES = 64 << 10
# Exactly these classes, and their low-precision variants.
_STATES: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
    Adagrad: ("sum",),
}


def directory_of(target: object) -> str:
    """Return the directory of a target "disk:/path".

    Raises:
        ValueError: another target.
    """
    if not isinstance(target, str) or not target.startswith(DISK) or target == DISK:
        raise ValueError(f"got {target!r} for optimizer states; pass 'disk:' and a directory, as in 'disk:/scratch'.")
    return target.removeprefix(DISK)


def offload_states(optimizer: Optimizer, target: str) -> None:
    """Keep the states of an optimizer in files on a disk, from now on; each process has files of its own.

    The files have no names, and disappear with the process. States of less than 64 KiB and sparse ones stay in memory.
    Call it after `fuse`, and before `StepInBackward`. The optimizer stays the same object, of a subclass of its class,
    and steps one parameter at a time; the results are the same to the bit. Existing states move to the disk.

    Args:
        optimizer: torch's Adam, AdamW, Adagrad or SGD with momentum, on CPU parameters; or a low-precision variant that
            `fuse` has made.
        target: "disk:" and a directory, which is created if it does not exist. A directory of a tmpfs is memory.

    Raises:
        ValueError: another optimizer, target or device.
        OSError: the directory cannot be written to, or has too little space for the states.
    """
    directory = directory_of(target)
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("got an optimizer that keeps its states on a disk already; call offload_states once.")
    base = type(optimizer)
    reason = _why_not(base, optimizer.param_groups)
    wrapper = vars(optimizer).get("step")
    if reason is None and wrapper is not None and not hasattr(wrapper, "_wrapped_by_lr_sched"):
        reason = f"{base.__name__} whose step() is replaced"
    if reason is not None:
        raise ValueError(_sentence(reason))
    optimizer.__class__ = _VARIANTS[base]
    assert isinstance(optimizer, OffloadedOptimizer)
    optimizer._directory = directory
    optimizer._forget()
    try:
        optimizer._move(optimizer._own_parameters())
    except BaseException:
        optimizer.__class__ = base  # type: ignore[assignment]
        raise
    vars(optimizer).pop("step", None)  # a scheduler's wrapper; the variant reports its steps itself


@dataclass(frozen=True)
class _Kept:
    """A state in a file: this rank's shard, and its pages."""

    local: Tensor
    region: Region


class OffloadedOptimizer(Optimizer):
    """The base of the variants that keep their states on a disk; `offload_states` makes one.

    Space for the states of a parameter is reserved before its first step. Adam and low-precision variants begin with
    zeros, which are there already; the states that other classes make in their first step move there after it.

    Attributes:
        stepped_class: the class whose step computes the results.
    """

    stepped_class: ClassVar[type[Optimizer]]
    _directory: str
    # By parameter and name: the states, and the zeros that are reserved for states; none for small ones.
    _kept: MutableMapping[Tensor, dict[str, _Kept]]
    _reserved: MutableMapping[Tensor, dict[str, _Kept]]
    _following: MutableMapping[Tensor, Callable[[], Tensor | None]]  # the parameter that is stepped after each
    _last: Callable[[], Tensor | None]  # returns the parameter that was stepped last

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, one parameter after another, as the step of the class does for all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # for learning rate schedulers
        groups = self.param_groups
        due = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        self._move([p for p, _ in due if p.requires_grad and not self._is_kept(p)])
        step: Any = self.stepped_class.step
        if hasattr(step, "hooked"):  # the hooks run once for each step, not for each parameter
            step = step.__wrapped__
        try:
            for parameter, group in due:
                self.param_groups = [{**group, "params": [parameter]}]
                # Rows of a weight require no gradient; `stepping` encloses the steps of all rows.
                with self.stepping(parameter) if parameter.requires_grad else contextlib.nullcontext():
                    step(self)
        finally:
            self.param_groups = groups
        return loss

    @contextlib.contextmanager
    def stepping(self, parameter: Tensor) -> Iterator[None]:
        """Enclose the step of a parameter, or the steps of all its rows: its states are on the disk before and after.

        Starts to read the states of the next parameter before, and to write those of this parameter after.
        """
        if not self._is_kept(parameter):
            self._move([parameter])
        if not self._has_begun(parameter):
            self._begin(parameter)
        last = self._last()
        if last is not None and last is not parameter:
            self._following[last] = weakref.ref(parameter)
        self._last = weakref.ref(parameter)
        following = self._following[parameter]() if parameter in self._following else None
        for kept in self._kept.get(following, {}).values() if following is not None else ():
            kept.region.prefetch()
        yield
        if not self._is_kept(parameter):  # the step has made states
            self._move([parameter])
        self._reserved.pop(parameter, None)
        for kept in self._kept[parameter].values():
            kept.region.write_behind()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as the class does, and move it to new files: an earlier `state_dict` keeps its values."""
        super().load_state_dict(state_dict)
        self._check(self.param_groups)
        self._forget()
        self._move(self._own_parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as the class does, with states on the disk."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1:])
            self._move([p for p in self.param_groups[-1]["params"] if p.requires_grad])
        except BaseException:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_directory": self._directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()  # a copy has files of its own, from its next step on

    def _forget(self) -> None:
        """Let go of all files; those of states live as long as the states."""
        self._kept, self._reserved, self._following = (WeakTensorKeyDictionary() for _ in range(3))
        self._last = lambda: None

    def _own_parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad or self.state.get(p)]

    def _check(self, groups: Iterable[dict[str, Any]]) -> None:
        if (reason := _why_not(self.stepped_class, groups)) is not None:
            raise ValueError(_sentence(reason))

    def _has_begun(self, parameter: Tensor) -> bool:
        """Return whether a parameter has other states than the lower bits of a split weight."""
        return bool(self.state.get(parameter, {}).keys() - {LOW_BITS})

    def _is_kept(self, parameter: Tensor) -> bool:
        """Return whether all large states of a parameter are in files, and space is reserved if there are none."""
        kept = self._kept.get(parameter, {})
        are_same = (
            name in kept and _is_same(value, kept[name].local)
            for name, value in _large(self.state.get(parameter, {})).items()
        )
        return parameter in self._kept and all(are_same) and (self._has_begun(parameter) or parameter in self._reserved)

    @torch.no_grad()
    def _move(self, parameters: Iterable[Tensor]) -> None:
        """Move the states of parameters to files, and reserve space for those that a first step makes."""
        moved: list[tuple[Tensor, str, Tensor]] = []
        wanted: list[tuple[Tensor, str, Tensor, torch.dtype]] = []
        parameters = list(parameters)
        for parameter in parameters:
            states = _large(self.state.get(parameter, {}))
            kept, reserved = self._kept.get(parameter, {}), self._reserved.get(parameter)
            for name, value in states.items():
                local = local_shard(value)
                if name in kept and _is_same(value, kept[name].local):
                    continue
                moved.append((parameter, name, value))
                if reserved is None or name not in reserved or not _has_layout(local, reserved[name].local):
                    wanted.append((parameter, name, local, local.dtype))
            if reserved is None and not self._has_begun(parameter):
                wanted += [
                    (parameter, name, like, dtype)
                    for name, like, dtype in self._first_states(parameter)
                    if like.numel() * dtype.itemsize >= MIN_BYTES
                ]
        size = sum(StateFile.size_of(like, dtype) for _, _, like, dtype in wanted)
        file = StateFile(self._directory, size) if size else None
        for parameter in parameters:
            self._reserved.setdefault(parameter, {})
            names = _large(self.state.get(parameter, {}))
            self._kept[parameter] = {n: kept for n, kept in self._kept.get(parameter, {}).items() if n in names}
        for parameter, name, like, dtype in wanted:
            assert file is not None
            self._reserved[parameter][name] = _Kept(*file.add(like, dtype))
        for parameter, name, value in moved:
            self._kept[parameter][name] = kept_state = self._reserved[parameter].pop(name)
            kept_state.local.copy_(local_shard(value))
            kept_state.region.write_behind()
            self.state[parameter][name] = _with_local(value, kept_state.local)

    def _first_states(self, parameter: Tensor) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        """Yield (name, tensor with the layout on this rank, dtype) of the states of a first step, without counts."""
        local = local_shard(parameter)
        if isinstance(self, LowPrecisionOptimizer):
            for name, dtype in self.state_dtypes(parameter).items():
                yield name, local, dtype
                if self.has_scale(name, dtype):
                    shape = state_shards.scale_shape(local.shape)
                    yield name + SCALE, torch.empty(shape, device="meta"), torch.float32
            return
        for name in _STATES[self.stepped_class]:
            yield name, local, local.dtype
        groups = (group for group in self.param_groups if any(parameter is p for p in group["params"]))
        if any(group.get("amsgrad") for group in groups):
            yield "max_exp_avg_sq", local, local.dtype

    def _begin(self, parameter: Tensor) -> None:
        """Make the reserved zeros the states of a parameter, if its class begins with zeros."""
        if self.stepped_class in (SGD, Adagrad):
            return
        states = {"step": torch.zeros((), dtype=torch.float32)}
        for name, like, dtype in list(self._first_states(parameter)):
            kept = self._reserved[parameter].pop(name, None)
            if kept is not None:
                self._kept[parameter][name] = kept
            local = torch.zeros_like(like, dtype=dtype, device="cpu") if kept is None else kept.local
            is_scale = name.endswith(SCALE)
            states[name] = (state_shards.scale_like_parameter if is_scale else state_shards.like_parameter)(
                local, parameter
            )
        self.state[parameter].update(states)


_step: Any = Optimizer.profile_hook_step(OffloadedOptimizer.step)
# Learning rate schedulers wrap `step` to see its calls, which these classes report themselves.
_step.hooked = _step._wrapped_by_lr_sched = True
OffloadedOptimizer.step = _step  # type: ignore[method-assign]


class OffloadedAdam(OffloadedOptimizer, Adam):
    """Adam with states on a disk."""

    stepped_class = Adam


class OffloadedAdamW(OffloadedOptimizer, AdamW):
    """AdamW with states on a disk."""

    stepped_class = AdamW


class OffloadedSGD(OffloadedOptimizer, SGD):
    """SGD with states on a disk."""

    stepped_class = SGD


class OffloadedAdagrad(OffloadedOptimizer, Adagrad):
    """Adagrad with states on a disk."""

    stepped_class = Adagrad


class OffloadedLowPrecisionAdam(OffloadedOptimizer, LowPrecisionAdam):
    """Adam with low-precision states on a disk."""

    stepped_class = LowPrecisionAdam


class OffloadedLowPrecisionAdamW(OffloadedOptimizer, LowPrecisionAdamW):
    """AdamW with low-precision states on a disk."""

    stepped_class = LowPrecisionAdamW


class OffloadedLowPrecisionSGD(OffloadedOptimizer, LowPrecisionSGD):
    """SGD with low-precision states on a disk."""

    stepped_class = LowPrecisionSGD


_VARIANTS: dict[type[Optimizer], type[OffloadedOptimizer]] = {
    variant.stepped_class: variant
    for variant in (
        OffloadedAdam,
        OffloadedAdamW,
        OffloadedSGD,
        OffloadedAdagrad,
        OffloadedLowPrecisionAdam,
        OffloadedLowPrecisionAdamW,
        OffloadedLowPrecisionSGD,
    )
}


def _why_not(cls: type[Optimizer], groups: Iterable[dict[str, Any]]) -> str | None:
    """Return why the states of a class with these groups cannot be on a disk; None if they can."""
    name, reason = cls.__name__, None
    if cls not in _VARIANTS:
        known = ", ".join(each.__name__ for each in _STATES)
        return f"an optimizer of class {name}, and only {known} and what `fuse` makes of them keep states on a disk"
    for group in groups:
        if issubclass(cls, SGD) and group.get("momentum") == 0:
            reason = "SGD without momentum, which has no states"
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                reason = f"{name} with {flag}=True"
        for parameter in group["params"]:
            if parameter.device.type != "cpu":
                reason = f"{name} with parameters on {parameter.device.type}, and only CPU states can be on a disk"
    return reason


def _sentence(reason: str) -> str:
    return f"got {reason}; pass another optimizer, or leave the offload out."


def _large(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the states that should be in files."""
    return {
        name: value
        for name, value in states.items()
        if isinstance(value, Tensor)
        and (local := local_shard(value)).layout == torch.strided
        and local.nbytes >= MIN_BYTES
    }


def _has_layout(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _is_same(value: Tensor, local: Tensor) -> bool:
    """Return whether the local shard of a state is a given tensor."""
    own = local_shard(value)
    return own.data_ptr() == local.data_ptr() and _has_layout(own, local)


def _with_local(value: Tensor, local: Tensor) -> Tensor:
    """Return a tensor with the values of `local`, sharded like `value`."""
    if not isinstance(value, DTensor):
        return local
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
