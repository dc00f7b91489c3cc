"""Keeps the states of an optimizer in CPU memory or on a disk: memory-mapped, read before the step, written behind it.

The states are ordinary tensors whose memory is the CPU's or a file's, so that checkpoints, hashes and steps by rows see
no difference, and the kernels of the steps stay the same: results are equal to the bit. An optimizer steps one
parameter at a time. Before a step it starts to read the states of the parameter that came next in the step before, and
after the step it starts to write the new states. In the time between, the backward or other steps run.

Parameters on other devices, and all parameters if states are in CPU memory, are stepped by `HostSteps`: on the CPU, in
a thread. A step that `StepInBackward` asks for may go on until the optimizer's `step()`, which waits for it.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from weft.strategy.data_parallel.local import distributed, local_gradient, local_shard
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.host_steps import HostSteps
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.state_file import NO_REGION, Region, StateFile
from weft.strategy.optimizers.state_format import LOW_BITS, SCALE

# Smaller states stay in CPU memory: they would take a page each, and more time to advise the kernel than to step.
MIN_BYTES = 64 << 10
# Exactly these classes, and their low-precision variants.
STATES: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
    Adagrad: ("sum",),
}


@dataclass(frozen=True)
class _Kept:
    """A state in a file or in CPU memory: this rank's shard, and its pages in the file."""

    local: Tensor
    region: Region


class OffloadedOptimizer(Optimizer):
    """The base of the variants that keep their states in CPU memory or on a disk; `offload_states` makes one.

    Space for the states of a parameter is reserved before its first step. Adam and low-precision variants begin with
    zeros, which are there already; the states that other classes make in their first step move there after it.

    Attributes:
        stepped_class: the class whose step computes the results.
    """

    stepped_class: ClassVar[type[Optimizer]]
    _step_supports_amp_scaling: bool
    _directory: str | None  # of the files; None: states are in CPU memory
    # By parameter and name: the states, and the zeros that are reserved for states; none for small ones.
    _kept: MutableMapping[Tensor, dict[str, _Kept]]
    _reserved: MutableMapping[Tensor, dict[str, _Kept]]
    _following: MutableMapping[Tensor, Tensor]  # the parameter that is stepped after each
    _last: Tensor | None  # the parameter that was stepped last
    _owner: Tensor | None  # inside of `stepping`: the parameter whose rows are stepped
    _host: HostSteps
    _unfinished: list[tuple[Tensor, dict[str, Any]]]  # parameters whose steps may run, with their local states

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, one parameter after another, as the step of the class does for all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # for learning rate schedulers
        self._forget_others()
        try:
            self.step_gradients()
        finally:
            self.wait()
        return loss

    def step_gradients(self) -> None:
        """Step the parameters that have a gradient, or rows of one; the steps may go on until `wait` or `step`."""
        groups = self.param_groups
        due = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        if self._owner is None:
            self._move([p for p, _ in due if not self._is_kept(p)])
        step: Any = self.stepped_class.step
        if hasattr(step, "hooked"):  # the hooks run once for each step, not for each parameter
            step = step.__wrapped__
        try:
            for parameter, group in due:
                self.param_groups = [{**group, "params": [parameter]}]
                if self._steps_on_host(parameter):
                    self._submit(parameter, group, step)
                    continue
                if self._owner is None:
                    self._begin_step(parameter)
                step(self)
                if self._owner is None:
                    self._end_step(parameter)
        finally:
            self.param_groups = groups

    def wait(self) -> None:
        """Wait for the steps that run on the CPU, and make the device wait for the new weights.

        Raises:
            the first error of a step.
        """
        if not self._unfinished:
            return
        try:
            self._host.wait()
        finally:
            unfinished, self._unfinished = self._unfinished, []
            for parameter, states in unfinished:
                own = self.state[parameter]
                for name, value in states.items():
                    if not isinstance(own.get(name), DTensor):
                        is_shard = _is_shard(value, parameter)
                        own[name] = state_shards.like_parameter(value, parameter) if is_shard else value
                self._end_step(parameter, writes=False)

    def settle(self) -> None:
        """Move states back that other code has moved, as Lightning moves states to the device of the parameters."""
        self._move(self._own_parameters())

    def _steps_on_host(self, parameter: Tensor) -> bool:
        return self._directory is None or parameter.device.type != "cpu"

    @torch.no_grad()
    def _submit(self, parameter: Tensor, group: Mapping[str, Any], step: Callable[[Optimizer], object]) -> None:
        """Start the step of a parameter on the CPU, or run that of rows of a parameter."""
        is_full = self._owner is None
        if is_full:
            self._begin_step(parameter)
        states = {
            name: value._local_tensor if isinstance(value, DTensor) else value
            for name, value in self.state.get(parameter, {}).items()
        }
        options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in group.items()}
        stepped = self.stepped_class.__new__(self.stepped_class)
        vars(stepped).update(vars(self))
        regions = [kept.region for kept in self._kept.get(parameter, {}).values()] if is_full else []

        def step_twin(twin: Tensor) -> None:
            stepped.param_groups = [{**options, "params": [twin]}]
            stepped.state = defaultdict(dict, {twin: states})
            if isinstance(stepped, LowPrecisionOptimizer):
                stepped._rows = {twin: stepped._rows.get(parameter, (parameter, 0))}
            step(stepped)
            for region in regions:
                region.write_behind()

        self._host.submit(local_shard(parameter), local_gradient(parameter, redistributes=True), step_twin)
        if is_full:
            self._unfinished.append((parameter, states))
        else:  # the caller goes on with the states
            self._host.wait()
            self.state[parameter] = states

    @contextlib.contextmanager
    def stepping(self, parameter: Tensor) -> Iterator[None]:
        """Enclose the steps of all rows of a parameter, whose states are in their place before and after."""
        self._begin_step(parameter)
        self._owner = parameter
        try:
            yield
        finally:
            self._owner = None
        self._end_step(parameter)

    def _begin_step(self, parameter: Tensor) -> None:
        """Prepare the states of a parameter, and start to read those of the next parameter."""
        if not self._is_kept(parameter):
            self._move([parameter])
        if not self._has_begun(parameter):
            self._begin(parameter)
        if self._last is not None and self._last is not parameter:
            self._following[self._last] = parameter
        self._last = parameter
        following = self._following.get(parameter)
        for kept in self._kept.get(following, {}).values() if following is not None else ():
            kept.region.prefetch()

    def _end_step(self, parameter: Tensor, writes: bool = True) -> None:
        """Move states that the step has made; with `writes`, start to write the states."""
        if not self._is_kept(parameter):  # the step has made states
            self._move([parameter])
        self._reserved.pop(parameter, None)
        for kept in self._kept[parameter].values() if writes else ():
            kept.region.write_behind()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as the class does, after the steps that run."""
        self.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as the class does, and move it to new memory: an earlier `state_dict` keeps its values."""
        self.wait()
        if isinstance(self, LowPrecisionOptimizer):
            super().load_state_dict(state_dict)
        else:
            # torch's own function would copy all states to the parameters' devices.
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            on_host = {
                key for key, p in zip(keys, _parameters_of(self.param_groups), strict=False) if self._steps_on_host(p)
            }
            others = {key: states for key, states in state_dict["state"].items() if key not in on_host}
            super().load_state_dict({**state_dict, "state": others})
            for key, parameter in zip(keys, _parameters_of(self.param_groups), strict=True):
                if key in on_host and key in state_dict["state"]:
                    states = state_dict["state"][key].items()
                    self.state[parameter] = {name: _adopted(name, value, parameter) for name, value in states}
        self._check(self.param_groups)
        self._forget()
        self._move(self._own_parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as the class does, with offloaded states."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1:])
            self._move([p for p in self.param_groups[-1]["params"] if p.requires_grad])
        except BaseException:
            self.param_groups.pop()
            raise

    def state_device(self, parameter: Tensor) -> torch.device:
        """Return the device of a parameter's states: the CPU."""
        return torch.device("cpu")

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {**super().__getstate__(), "_directory": self._directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()  # a copy has memory or files of its own, from its next step on
        self._host, self._unfinished = HostSteps(), []

    def _forget(self) -> None:
        """Let go of all memory and files; those of states live as long as the states."""
        self._kept, self._reserved, self._following = {}, {}, {}
        self._last = self._owner = None

    def _forget_others(self) -> None:
        """Let go of what belongs to parameters that the optimizer no longer has."""
        own = set(_parameters_of(self.param_groups))
        mappings: tuple[MutableMapping[Tensor, Any], ...] = (self._kept, self._reserved, self._following)
        for mapping in mappings:
            for parameter in [parameter for parameter in mapping if parameter not in own]:
                del mapping[parameter]
        self._following = {first: second for first, second in self._following.items() if second in own}
        self._last = self._last if self._last in own else None
        self._host.num_bytes = max((local_shard(parameter).nbytes for parameter in own), default=0)

    def _own_parameters(self) -> list[Tensor]:
        return [p for p in _parameters_of(self.param_groups) if p.requires_grad or self.state.get(p)]

    def _check(self, groups: Iterable[dict[str, Any]]) -> None:
        if (reason := why_not(self.stepped_class, groups)) is not None:
            raise ValueError(error_text(reason))

    def _has_begun(self, parameter: Tensor) -> bool:
        """Return whether a parameter has other states than the lower bits of a split weight."""
        return bool(self.state.get(parameter, {}).keys() - {LOW_BITS})

    def _is_kept(self, parameter: Tensor) -> bool:
        """Return whether all large states of a parameter are moved, and space is reserved if there are none."""
        kept = self._kept.get(parameter, {})
        are_same = (
            name in kept and _is_same(value, kept[name].local)
            for name, value in self._states_to_move(parameter).items()
        )
        return parameter in self._kept and all(are_same) and (self._has_begun(parameter) or parameter in self._reserved)

    @torch.no_grad()
    def _move(self, parameters: Iterable[Tensor]) -> None:
        """Move the states of parameters, and reserve space for those that a first step makes."""
        moved: list[tuple[Tensor, str, Tensor]] = []
        wanted: list[tuple[Tensor, str, Tensor, torch.dtype]] = []
        parameters = list(parameters)
        for parameter in parameters:
            states = self._states_to_move(parameter)
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
                    if like.numel() * dtype.itemsize >= self._min_bytes
                ]
        size = sum(StateFile.size_of(like, dtype) for _, _, like, dtype in wanted)
        file = StateFile(self._directory, size) if size and self._directory is not None else None
        for parameter in parameters:  # from here on, nothing fails
            move_to_cpu(self.state.get(parameter, {}), except_for=self._states_to_move(parameter))
            self._reserved.setdefault(parameter, {})
            names = self._states_to_move(parameter)
            self._kept[parameter] = {n: kept for n, kept in self._kept.get(parameter, {}).items() if n in names}
        for parameter, name, like, dtype in wanted:
            if file is not None:
                self._reserved[parameter][name] = _Kept(*file.add(like, dtype))
            else:
                self._reserved[parameter][name] = _Kept(torch.zeros_like(like, dtype=dtype, device="cpu"), NO_REGION)
        for parameter, name, value in moved:
            self._kept[parameter][name] = kept_state = self._reserved[parameter].pop(name)
            kept_state.local.copy_(local_shard(value))
            kept_state.region.write_behind()
            self.state[parameter][name] = _with_local(value, kept_state.local)

    @property
    def _min_bytes(self) -> int:
        return 1 if self._directory is None else MIN_BYTES

    def _states_to_move(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter that should be moved."""
        return {
            name: value
            for name, value in self.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
            and (local := local_shard(value)).layout == torch.strided
            and local.dim() > 0
            and local.nbytes >= self._min_bytes
        }

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
        for name in STATES[self.stepped_class]:
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


def move_to_cpu(states: MutableMapping[str, Any], except_for: Container[str] = ()) -> None:
    """Move the states of a parameter to CPU memory; the shards of DTensors, too."""
    for name, value in states.items():
        if name not in except_for and isinstance(value, Tensor) and local_shard(value).device.type != "cpu":
            states[name] = _with_local(value, local_shard(value).cpu())


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
    return distributed(local, value, value.shape, value.stride())


def _is_shard(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == local_shard(parameter).shape


def _adopted(name: str, value: Any, parameter: Tensor) -> Any:
    """Return a saved state in CPU memory, in the dtype that torch's `load_state_dict` gives it."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    local = local_shard(value)
    if name == "step":
        return local.to("cpu", torch.float32, copy=True)
    dtype = parameter.dtype if parameter.is_floating_point() else local.dtype
    is_moved = local.layout == torch.strided and local.nbytes >= MIN_BYTES  # and copied then
    return _with_local(value, local.to("cpu", dtype, copy=not is_moved))


def _parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def why_not(cls: type[Optimizer], groups: Iterable[Mapping[str, Any]]) -> str | None:
    """Return why the states of an optimizer of this class with these groups cannot move; None if they can."""
    name, reason = cls.__name__, None
    for group in groups:
        if issubclass(cls, SGD) and group.get("momentum") == 0:
            reason = "SGD without momentum, which has no states"
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                reason = f"{name} with {flag}=True"
        for parameter in group["params"]:
            if parameter.device.type not in ("cpu", "cuda"):
                reason = f"{name} with parameters on {parameter.device.type}, and states move from CUDA and the CPU"
    return reason


def error_text(reason: str) -> str:
    """Return the error for an optimizer whose states cannot move."""
    return f"got {reason}; pass another optimizer, or leave the offload out."
