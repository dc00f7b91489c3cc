"""Adam, AdamW and SGD with states of 1 or 2 bytes per element, and with weights split into bfloat16 and low bits.

The formats and their rounding are described in `weft/kernels/optimizer.h`, and blocks in
`weft.strategy.optimizers.state_shards`. The states of a parameter are

    name                                      int8                  bfloat16      float32
    step                                      float32, on the CPU
    exp_avg, momentum_buffer                  int8                  bfloat16      float32
    exp_avg_sq                                uint8                 bfloat16      float32
    exp_avg_scale, ... (one for each)         float32, per block
    low_bits, if weights are split            int16 or int8

A step computes in float32. Small parameters, with fewer than 4096 elements or one dim, such as biases and the weights
of norms, have float32 states and stay float32: there is nothing to save, and norms compute with float32 weights. FSDP2
needs one dtype in a unit, so there their weights are split, too.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from weft import ops
from weft.strategy.data_parallel.local import local_shard, shard_like
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.state_shards import place_of

MIN_ELEMENTS = 4096
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
LOW_DTYPES = {"float32": None, "split": torch.int16, "split8": torch.int8}
LOW_BITS = "low_bits"
SCALE = "_scale"
# torch.compile and torch's checkpoint_wrapper insert these prefixes into names of parameters.
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class StateFormat:
    """The format of an optimizer's states and of its weights.

    Attributes:
        states: "float32", "bfloat16" or "int8".
        weights: "float32" (weights keep their dtype), "split" or "split8": weights are bfloat16, and 16 or 8 lower bits
            are a state.
    """

    states: str = "float32"
    weights: str = "float32"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("optimizer_state", self.states, STATE_DTYPES),
            ("master_weights", self.weights, LOW_DTYPES),
        ):
            if value not in known:
                names = ", ".join(repr(each) for each in known)
                raise ValueError(f"got {name}={value!r}; pass one of {names}.")

    @property
    def is_usual(self) -> bool:
        """Return whether this is the format of torch's optimizers."""
        return self == StateFormat()

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of the states of a parameter; int8 stands for codes."""
        return torch.float32 if is_small(parameter) else STATE_DTYPES[self.states]


def is_small(parameter: Tensor) -> bool:
    """Return whether the states of a parameter are float32 in every format."""
    return parameter.dim() < 2 or parameter.numel() < MIN_ELEMENTS


class LowPrecisionOptimizer(Optimizer):
    """What the low-precision variants of Adam, AdamW and SGD have in common; `use_low_precision` makes one.

    Attributes:
        format: the format of states and weights.
    """

    # The states that have an element for each element of the parameter, with the dtype of their codes.
    _codes: ClassVar[dict[str, torch.dtype]]
    format: StateFormat
    _step_supports_amp_scaling: bool
    _seeds: dict[Tensor, int]
    _rows: dict[Tensor, tuple[Tensor, int]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, as the step of torch's class does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # for learning rate schedulers
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_parameter(parameter, group)
        return loss

    def _step_parameter(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        states = self.state[parameter]
        if "step" not in states:
            states.update(self.initial_states(parameter))
        owner, first_row = self._rows.get(parameter, (parameter, 0))
        if first_row == 0:
            states["step"] += 1
        place = place_of(owner)
        seed = self._seeds.get(owner, 0)
        local = {name: local_shard(value) for name, value in states.items() if name != "step"}
        self._call(
            local_shard(parameter),
            _local_gradient(parameter),
            local,
            group,
            step=int(states["step"]),
            seed=seed,
            row=place.row + first_row,
            column=place.column,
            full_columns=place.full_columns,
        )

    def _call(
        self, parameter: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], **place: int
    ) -> None:
        raise NotImplementedError

    def initial_states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter before its first step, except for `low_bits` that exist already."""
        states = {"step": torch.zeros(())}
        dtype = self.format.state_dtype(parameter)
        for name, codes in self._codes.items():
            states[name] = state_shards.new_state(parameter, codes if dtype == torch.int8 else dtype)
            if dtype == torch.int8:
                states[name + SCALE] = state_shards.new_scale(parameter)
        low_dtype, is_new = self._low_dtype, LOW_BITS not in self.state.get(parameter, {})
        if low_dtype is not None and parameter.dtype == torch.bfloat16 and is_new:
            states[LOW_BITS] = state_shards.new_state(parameter, low_dtype)
        return states

    def begin_rows(self, rows: Tensor, parameter: Tensor, first_row: int) -> None:
        """Note that `rows` are rows of a parameter's local shard, from `first_row` on, until `end_rows`.

        The rows share the parameter's step count, which the step of the rows from 0 on increments.
        """
        self._rows[rows] = (parameter, first_row)

    def end_rows(self, rows: Tensor) -> None:
        self._rows.pop(rows, None)

    @property
    def _low_dtype(self) -> torch.dtype | None:
        return LOW_DTYPES[self.format.weights]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; its weights are split, too."""
        super().add_param_group(param_group)
        self.split_weights(self.param_groups[-1:])

    @torch.no_grad()
    def split_weights(self, groups: list[dict[str, Any]], of_units: Container[Tensor] = ()) -> None:
        """Make float32 parameters of groups bfloat16, in place, and keep their lower bits as states.

        `of_units`: parameters that FSDP2 gathers, which are split even if they are small.
        """
        if self._low_dtype is None:
            return
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if parameter.dtype == torch.float32 and (parameter in of_units or not is_small(parameter)):
                high, low = ops.split_float(local_shard(parameter).contiguous(), self._low_dtype)
                self.state[parameter][LOW_BITS] = state_shards.like_parameter(low, parameter)
                replace_data(parameter, high)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in this format, or with states in float32 or bfloat16, which are then converted.

        States with scales must be those of shards with the same blocks; others are converted with
        `state_in_full_precision` before.
        """
        low_bits = {parameter: states.get(LOW_BITS) for parameter, states in self.state.items()}
        # torch's own function would convert all states to the dtype of the parameters.
        steps = {
            key: {name: value for name, value in states.items() if name == "step"}
            for key, states in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": steps})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        with torch.no_grad():
            for key, parameter in zip(keys, parameters, strict=True):
                if low_bits.get(parameter) is not None:  # those of the present weights
                    self.state[parameter][LOW_BITS] = low_bits[parameter]
                if key in state_dict["state"]:
                    self.state[parameter] = self._adopt(parameter, state_dict["state"][key])

    def _adopt(self, parameter: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return saved states in this optimizer's format."""
        states: dict[str, Any] = {**self.state.get(parameter, {}), **self.initial_states(parameter)}
        states["step"] = torch.as_tensor(saved.get("step", 0.0), dtype=torch.float32).cpu().clone()
        for name in self._codes:
            value = saved.get(name)
            if value is None:
                continue
            scale = saved.get(name + SCALE)
            if scale is not None and name + SCALE in states:
                states[name].copy_(value)
                states[name + SCALE].copy_(scale)
                continue
            if name + SCALE in states:
                codes, scales = ops.quantize_blocks(local_shard(value).float().contiguous(), self._is_signed(name))
                local_shard(states[name]).copy_(codes)
                local_shard(states[name + SCALE]).copy_(scales)
            else:
                local_shard(states[name]).copy_(local_shard(value))
        if LOW_BITS in saved and LOW_BITS in states:
            self._adopt_low_bits(parameter, local_shard(saved[LOW_BITS]), local_shard(states[LOW_BITS]))
        return states

    def _adopt_low_bits(self, parameter: Tensor, saved: Tensor, low_bits: Tensor) -> None:
        if saved.dtype == low_bits.dtype:
            low_bits.copy_(saved)
            return
        joined = ops.join_float(local_shard(parameter).contiguous(), saved.to(parameter.device).contiguous())
        high, low = ops.split_float(joined, low_bits.dtype)
        local_shard(parameter).copy_(high)
        low_bits.copy_(low)

    def _is_signed(self, name: str) -> bool:
        return self._codes[name] == torch.int8

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "format": self.format, "_seeds": self._seeds, "_rows": {}}


class LowPrecisionAdam(LowPrecisionOptimizer, Adam):
    """Adam with low-precision states."""

    _codes: ClassVar[dict[str, torch.dtype]] = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}

    def _call(
        self, parameter: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], **place: int
    ) -> None:
        beta1, beta2 = group["betas"]
        ops.adam_step_(
            parameter,
            grad,
            states["exp_avg"],
            states.get("exp_avg_scale"),
            states["exp_avg_sq"],
            states.get("exp_avg_sq_scale"),
            states.get(LOW_BITS),
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group.get("decoupled_weight_decay", isinstance(self, AdamW)),
            maximize=group["maximize"],
            **place,
        )


class LowPrecisionAdamW(LowPrecisionAdam, AdamW):
    """AdamW with low-precision states."""


class LowPrecisionSGD(LowPrecisionOptimizer, SGD):
    """SGD with momentum, with low-precision states."""

    _codes: ClassVar[dict[str, torch.dtype]] = {"momentum_buffer": torch.int8}

    def _call(
        self, parameter: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], **place: int
    ) -> None:
        ops.momentum_step_(
            parameter,
            grad,
            states["momentum_buffer"],
            states.get("momentum_buffer_scale"),
            states.get(LOW_BITS),
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            **place,
        )


_VARIANTS: dict[type[Optimizer], type[LowPrecisionOptimizer]] = {
    Adam: LowPrecisionAdam,
    AdamW: LowPrecisionAdamW,
    SGD: LowPrecisionSGD,
}
# Learning rate schedulers wrap `step` to see its calls, which these classes report themselves.
for _variant in _VARIANTS.values():
    _variant.step = Optimizer.profile_hook_step(_variant.step)  # type: ignore[method-assign]
    _variant.step.hooked = True  # type: ignore[attr-defined]
    _variant.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def use_low_precision(optimizer: Optimizer, model: nn.Module | None, state_format: StateFormat) -> None:
    """Make an optimizer without states use low-precision states, and split its weights, as `state_format` says.

    The optimizer stays the same object, of a subclass of its class. `model` names the parameters: the rounding of a
    parameter's states depends on its name, not on its shard or on the other parameters.

    Raises:
        ValueError: the optimizer's class or options have no low-precision variant, or it has states already.
    """
    _check(optimizer)
    for flags in (optimizer.defaults, *optimizer.param_groups):
        flags.update(fused=False, foreach=False)
    vars(optimizer).pop("step", None)  # a scheduler's wrapper, see above
    optimizer.__class__ = _VARIANTS[type(optimizer)]
    assert isinstance(optimizer, LowPrecisionOptimizer)
    optimizer._step_supports_amp_scaling = False
    optimizer.format = state_format
    names: dict[Tensor, str] = {} if model is None else {p: name for name, p in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer._seeds = {p: zlib.crc32(_unwrapped(names.get(p, str(idx))).encode()) for idx, p in enumerate(ordered)}
    optimizer._rows = {}
    units = [] if model is None else [module for module in model.modules() if isinstance(module, FSDPModule)]
    optimizer.split_weights(optimizer.param_groups, {p for unit in units for p in unit.parameters()})
    if state_format.weights != "float32" and model is not None:
        for unit in units:
            _update_unit(unit)
        model.register_load_state_dict_pre_hook(_SplitOnLoad(optimizer, names))


def _check(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer has no low-precision variant."""
    name = type(optimizer).__name__
    reason = None
    if type(optimizer) not in _VARIANTS:
        known = ", ".join(cls.__name__ for cls in _VARIANTS)
        reason = f"of class {name}, and only {known} have low-precision states"
    elif any(optimizer.state.values()):
        reason = f"{name} that has made a step already"
    else:
        for group in optimizer.param_groups:
            if type(optimizer) is SGD and group["momentum"] == 0:
                reason = "SGD without momentum, which has no states"
            for flag in ("amsgrad", "capturable", "differentiable"):
                if group.get(flag):
                    reason = f"{name} with {flag}=True"
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float32, torch.bfloat16):
                    reason = f"{name} with a parameter of dtype {parameter.dtype}"
    wrapper = vars(optimizer).get("step")
    if reason is None and wrapper is not None and not hasattr(wrapper, "_wrapped_by_lr_sched"):
        reason = f"{name} whose step() is replaced"
    if reason is not None:
        raise ValueError(
            f"got an optimizer {reason}; pass optimizer_state='float32' and master_weights='float32', or another "
            "optimizer."
        )


def _update_unit(unit: FSDPModule) -> None:
    """Make FSDP2 gather the new local shards of a unit in their dtype, also if it has gathered the old ones before."""
    unit.reshard()
    state: Any = unit._get_fsdp_state()
    # Newer versions of torch have several groups in a unit.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is None:
            continue
        for fsdp_param in group.fsdp_params:
            fsdp_param.reset_sharded_param()
            fsdp_param.all_gather_outputs = []
            vars(fsdp_param).pop("_unsharded_param", None)
        group._init_mp_dtypes()


def _unwrapped(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


class _SplitOnLoad:
    """A hook before `load_state_dict`: float32 values of split weights give these weights all their bits.

    Values of other dtypes have no lower bits; those of a checkpoint come with its optimizer.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer, names: Mapping[Tensor, str]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = {parameter: _unwrapped(name) for parameter, name in names.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": _no_optimizer, "_names": {}}  # a copy of the model has no optimizer

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        keys = {_unwrapped(key): key for key in state_dict}
        for parameter, states in optimizer.state.items():
            key = keys.get(prefix + self._names.get(parameter, ""))
            if key is None or LOW_BITS not in states:
                continue
            value, low_bits = state_dict[key], local_shard(states[LOW_BITS])
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                value = shard_like(value, parameter)
            local = local_shard(value)
            if local.dtype != torch.float32 or local.shape != low_bits.shape:
                low_bits.zero_()
                continue
            high, low = ops.split_float(local.to(low_bits.device).contiguous(), low_bits.dtype)
            low_bits.copy_(low)
            state_dict[key] = state_shards.like_parameter(high, parameter)


def _no_optimizer() -> None:
    return None


def splits_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has split weights; Fabric's wrapper of an optimizer is looked through."""
    own = getattr(optimizer, "optimizer", optimizer)
    return isinstance(own, LowPrecisionOptimizer) and own.format.weights != "float32"


def target_for_loading(state: Mapping[str, Any], saved_dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Return a model's state into which a checkpoint is loaded: bfloat16 tensors are float32 where the checkpoint is.

    So weights that are split get all their bits. `saved_dtypes`: of the checkpoint's tensors, by the state's names.
    """
    return {
        name: torch.empty_like(value, dtype=torch.float32)
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16 and saved_dtypes.get(name) == torch.float32
        else value
        for name, value in state.items()
    }


def _local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's gradient of its shard; collective if the gradient is a partial sum.

    Raises:
        RuntimeError: the gradient is sharded in another way than the parameter.
    """
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        wanted = parameter.placements if isinstance(parameter, DTensor) else None
        if wanted is not None and any(p.is_partial() for p in gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        if gradient.placements != wanted:
            raise RuntimeError(
                f"the optimizer got a parameter with the placements {wanted} and its gradient with "
                f"{gradient.placements}; give them the same ones."
            )
    local = local_shard(gradient)
    if local.dtype not in (torch.float32, parameter.dtype):
        local = local.float()
    return local.contiguous()


def replace_data(parameter: Tensor, local: Tensor) -> None:
    """Replace the values of a parameter by a local shard of another dtype; the parameter stays the same object."""
    if not isinstance(parameter, DTensor):
        parameter.data = local
        return
    new = state_shards.like_parameter(local, parameter)
    assert isinstance(new, DTensor)
    parameter.data = new
    parameter._local_tensor, parameter._spec = new._local_tensor, new._spec
