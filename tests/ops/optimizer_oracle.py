"""The optimizer steps in float64, their random numbers and their formats, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 256
LARGEST = {torch.int8: 127, torch.uint8: 255}
MASK = 0xFFFFFFFF


def _mix(word: Tensor, before_first: Tensor, before_second: Tensor) -> Tensor:
    """Return the keyed hash of kernels/src/low_precision.h; int64 tensors hold 32-bit words."""
    word = word ^ before_first
    word = (word ^ (word >> 16)) * 0x7FEB352D & MASK
    word = word ^ before_second
    word = (word ^ (word >> 15)) * 0x846CA68B & MASK
    return word ^ (word >> 16)


def random_bits(seed: int, step: int, positions: Tensor) -> Tensor:
    """Return 32 random bits for each int64 position, in int64."""
    seed_low, seed_high = torch.tensor(seed & MASK), torch.tensor(seed >> 32 & MASK)
    a = _mix(torch.tensor(step & MASK), seed_low, seed_high)
    b = _mix(torch.tensor(step >> 32 & MASK), a, seed_low)
    c = _mix(positions >> 32 & MASK, b, a)
    return _mix(positions & MASK, c, _mix(b.expand_as(c), a, c))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor of this shape."""
    if len(shape) < 2:
        return 1, torch.Size(shape).numel()
    return shape[0], torch.Size(shape[1:]).numel()


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, columns = matrix_shape(shape)
    blocks = -(-columns // BLOCK)
    return (rows, blocks) if len(shape) >= 2 else (blocks,)


def per_element(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the scale of each element of a tensor of this shape, in float64."""
    rows, columns = matrix_shape(shape)
    blocks = -(-columns // BLOCK)
    return scale.double().reshape(rows, blocks).repeat_interleave(BLOCK, 1)[:, :columns].reshape(shape)


def block_maxima(x: Tensor) -> Tensor:
    """Return the largest magnitude of each block of x, as a scale of x."""
    rows, columns = matrix_shape(tuple(x.shape))
    blocks = -(-columns // BLOCK)
    padded = torch.zeros(rows, blocks * BLOCK, dtype=x.dtype)
    padded[:, :columns] = x.reshape(rows, columns).abs()
    return padded.reshape(rows, blocks, BLOCK).amax(2).reshape(scale_shape(tuple(x.shape)))


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the float64 numbers of codes."""
    root = codes.double() / LARGEST[codes.dtype]
    return per_element(scale, tuple(codes.shape)) * root * root.abs()


def companded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unrounded magnitudes of the codes of x, in float64; 0 where the scale is 0."""
    ratio = x.double().abs() / per_element(scale, tuple(x.shape))
    return LARGEST[dtype] * ratio.nan_to_num(0.0).sqrt()


@dataclass
class State:
    """A state in one of its formats."""

    values: Tensor
    scale: Tensor | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, ...], kind: str, signed: bool = True) -> State:
        """Return zeros; `kind`: float32, bfloat16 or codes."""
        if kind == "codes":
            return cls(torch.zeros(shape, dtype=torch.int8 if signed else torch.uint8), torch.zeros(scale_shape(shape)))
        return cls(torch.zeros(shape, dtype=getattr(torch, kind)))

    def double(self) -> Tensor:
        return self.values.double() if self.scale is None else decode(self.values, self.scale)

    def clone(self) -> State:
        return State(self.values.clone(), None if self.scale is None else self.scale.clone())

    def tensors(self) -> list[Tensor]:
        return [self.values] if self.scale is None else [self.values, self.scale]


@dataclass
class Case:
    """The tensors and the options of one step; `options` are the operator's keyword arguments."""

    parameter: Tensor
    low_bits: Tensor | None
    grad: Tensor
    states: list[State]
    options: dict[str, object] = field(default_factory=dict)

    def clone(self) -> Case:
        low_bits = None if self.low_bits is None else self.low_bits.clone()
        states = [state.clone() for state in self.states]
        return Case(self.parameter.clone(), low_bits, self.grad.clone(), states, dict(self.options))

    @property
    def is_adam(self) -> bool:
        return len(self.states) == 2

    def arguments(self) -> list[Tensor | None]:
        states = [each for state in self.states for each in (state.values, state.scale)]
        return [self.parameter, self.grad, *states, self.low_bits]

    def run(self) -> None:
        import weft

        op = weft.ops.adam_step_ if self.is_adam else weft.ops.momentum_step_
        op(*self.arguments(), **self.options)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        low_bits = [] if self.low_bits is None else [self.low_bits]
        return [self.parameter, *low_bits, *(each for state in self.states for each in state.tensors())]

    def full_parameter(self) -> Tensor:
        """Return the parameter in float64, with its low bits."""
        if self.low_bits is None:
            return self.parameter.double()
        low = self.low_bits.int() << (8 if self.low_bits.dtype == torch.int8 else 0)
        high = self.parameter.view(torch.int16).int() << 16
        return (high + low).view(torch.float32).double()

    def positions(self) -> Tensor:
        """Return the position of each element in the unsharded tensor."""
        rows, columns = matrix_shape(tuple(self.parameter.shape))
        row = torch.arange(rows)[:, None] + self.options["row"]
        column = torch.arange(columns) + self.options["column"]
        return (row * self.options["full_columns"] + column).reshape(self.parameter.shape)

    def random(self, index: int) -> Tensor:
        """Return the random units, in [0, 2^16), of the elements of a state."""
        bits = random_bits(self.options["seed"], self.options["step"], self.positions())
        return bits >> 16 if index else bits & 0xFFFF

    def exact(self) -> tuple[Tensor, list[Tensor]]:
        """Return the parameter and the states after the step, in float64, before they are rounded."""
        return _adam(self) if self.is_adam else _momentum(self)


def _adam(case: Case) -> tuple[Tensor, list[Tensor]]:
    options, p = case.options, case.full_parameter()
    g = -case.grad.double() if options["maximize"] else case.grad.double()
    if options["decoupled_weight_decay"]:
        p = p * (1 - options["lr"] * options["weight_decay"])
    elif options["weight_decay"]:
        g = g + options["weight_decay"] * p
    m, v = (state.double() for state in case.states)
    m = options["beta1"] * m + (1 - options["beta1"]) * g
    v = options["beta2"] * v + (1 - options["beta2"]) * g * g
    corrected = [1 - options[beta] ** options["step"] for beta in ("beta1", "beta2")]
    denominator = (v / corrected[1]).sqrt() + options["eps"]
    return p - options["lr"] * (m / corrected[0]) / denominator, [m, v]


def _momentum(case: Case) -> tuple[Tensor, list[Tensor]]:
    options, p = case.options, case.full_parameter()
    g = -case.grad.double() if options["maximize"] else case.grad.double()
    if options["weight_decay"]:
        g = g + options["weight_decay"] * p
    buffer = case.states[0].double()
    buffer = g if options["step"] == 1 else options["momentum"] * buffer + (1 - options["dampening"]) * g
    return p - options["lr"] * (g + options["momentum"] * buffer if options["nesterov"] else buffer), [buffer]
