"""Adam, AdamW and SGD with states of 1 or 2 bytes per element, and with weights split into bfloat16 and low bits.

The formats and their rounding are described in `weft/kernels/float_codes.h` and `optimizer_step.h`, and blocks in
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

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from weft import ops
from weft.strategy.data_parallel.local import local_gradient, local_shard
from weft.strategy.optimizers import state_shards
from weft.strategy.optimizers.state_format import LOW_BITS, LOW_DTYPES, SCALE, StateFormat, is_small
from weft.strategy.optimizers.state_shards import Place, place_of


class LowPrecisionOptimizer(Optimizer):
    """The base of the low-precision variants of Adam, AdamW and SGD; `use_low_precision` makes one.

    Attributes:
        format: the format of states and weights.
    """

    # The states that have an element for each element of the parameter, with the dtype of their codes.
    _codes: ClassVar[dict[str, torch.dtype]]
    format: StateFormat
    _step_supports_amp_scaling: bool
    _seeds: dict[Tensor, int]
    _places: dict[Tensor, Place]  # of parameters that have made a step; computing one takes longer than a small step
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
        place = self._places.get(owner)
        if place is None:
            place = self._places[owner] = place_of(owner)
        seed = self._seeds.get(owner, 0)
        local = {name: local_shard(value) for name, value in states.items() if name != "step"}
        self._call(
            local_shard(parameter),
            local_gradient(parameter).contiguous(),
            local,
            group,
            step=int(states["step"]),
            seed=seed,
            row=place.row + first_row,
            column=place.column,
            full_columns=place.full_columns,
        )

    @abstractmethod
    def _call(
        self, parameter: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], **place: int
    ) -> None:
        """Step a local shard by the operator, with the options of its group; `place`: step, seed and place."""

    def initial_states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter before its first step, except for `low_bits` that exist already."""
        states = {"step": torch.zeros(())}
        for name, dtype in self.state_dtypes(parameter).items():
            states[name] = state_shards.new_state(parameter, dtype, self.state_device(parameter))
            if self.has_scale(name, dtype):
                states[name + SCALE] = state_shards.new_scale(parameter, self.state_device(parameter))
        return states

    def state_device(self, parameter: Tensor) -> torch.device:
        """Return the device of a parameter's states."""
        return parameter.device

    def state_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """Return the dtypes of a parameter's elementwise states by name, except for `low_bits` that exist already."""
        dtype = self.format.state_dtype(parameter)
        dtypes = {name: codes if dtype == torch.int8 else dtype for name, codes in self._codes.items()}
        low_dtype, is_new = self._low_dtype, LOW_BITS not in self.state.get(parameter, {})
        if low_dtype is not None and parameter.dtype == torch.bfloat16 and is_new:
            dtypes[LOW_BITS] = low_dtype
        return dtypes

    def has_scale(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a state of this dtype has a scale for each block."""
        return name != LOW_BITS and dtype.itemsize == 1

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
                state_shards.replace_data(parameter, high)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in this format, or with states in float32 or bfloat16, which are then converted.

        States with scales must be those of shards with the same blocks; `saved_states.states_to_load` converts others.
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
        return {**super().__getstate__(), "format": self.format, "_seeds": self._seeds, "_places": {}, "_rows": {}}


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


VARIANTS: dict[type[Optimizer], type[LowPrecisionOptimizer]] = {
    Adam: LowPrecisionAdam,
    AdamW: LowPrecisionAdamW,
    SGD: LowPrecisionSGD,
}
# Learning rate schedulers wrap `step` to see its calls, which these classes report themselves.
for _variant in VARIANTS.values():
    # Not of `_variant.step`, which may be a wrapped one of its base: hooks would run twice.
    _variant.step = Optimizer.profile_hook_step(LowPrecisionOptimizer.step)  # type: ignore[method-assign]
    _variant.step.hooked = True  # type: ignore[attr-defined]
    _variant.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
