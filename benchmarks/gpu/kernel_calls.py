"""Calls of each single-device kernel with small odd sizes: full and partial packs, no rows, unaligned storage.

`gpu.smoke` compares them with float64 on the CPU, `gpu.sanitizer_suite` runs them under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import weft  # noqa: F401 - registers the operators

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
# (rows, columns): below one pack; packs with a remainder; more than the threads of a block; no rows.
SIZES = ((3, 5), (2, 129), (37, 264), (2, 4099), (0, 8))


@dataclass(frozen=True)
class KernelCall:
    """A call of an operator that runs kernels only.

    Attributes:
        name: of the launch in kernels/cuda, which is also that of the private operator, without its underscore.
        args: its arguments on the CPU.
        changed: the positions of the arguments into which it writes; it then returns nothing.
        unaligned: whether tensors start one element after an aligned address.
        operator: the name of a public operator; "": the private one. Public ones have few dtypes, so tensors keep
            theirs also in the reference, the kernels of the CPU.
        options: keyword arguments.
    """

    name: str
    args: tuple[object, ...]
    changed: tuple[int, ...] = ()
    unaligned: bool = False
    operator: str = ""
    options: dict[str, object] = field(default_factory=dict)

    def run(self, device: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Run on a device, with floating-point tensors of `dtype`, if given; return the results."""
        dtype = None if self.operator else dtype
        args = [self._moved(arg, device, dtype) for arg in self.args]
        result = getattr(torch.ops.weft, self.operator or f"_{self.name}").default(*args, **self.options)
        if self.changed:
            return [each for each in (args[position] for position in self.changed) if isinstance(each, Tensor)]
        return [result] if isinstance(result, Tensor) else list(result)

    def _moved(self, arg: object, device: str, dtype: torch.dtype | None) -> object:
        if not isinstance(arg, Tensor):
            return arg
        if dtype is not None and arg.is_floating_point():
            arg = arg.to(dtype)
        if not self.unaligned:
            return arg.to(device, copy=True)
        # Shifted before the transfer, so that no kernel but weft's runs on the device.
        shifted = torch.cat([torch.zeros(1, dtype=arg.dtype), arg.reshape(-1)]).to(device)
        return shifted[1:].view(arg.shape)


def kernel_calls(dtype: torch.dtype) -> Iterator[KernelCall]:
    """Yield the calls of all kernels for inputs of this dtype; random from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in SIZES:
        for unaligned in (False, True):
            yield from _calls(rows, columns, dtype, unaligned, generator)
            yield from _optimizer_calls(rows, columns, dtype, unaligned, generator)


def _calls(
    rows: int, columns: int, dtype: torch.dtype, unaligned: bool, generator: torch.Generator
) -> Iterator[KernelCall]:
    accumulator = torch.float64 if dtype is torch.float64 else torch.float32

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(kind)

    def call(name: str, *args: object, changed: tuple[int, ...] = ()) -> KernelCall:
        return KernelCall(name, args, changed, unaligned)

    x, y, z = (random(rows, columns) for _ in range(3))
    for activation in ACTIVATIONS:
        yield call("activation", x, activation)
        yield call("activation_backward", y, x, activation)
        yield call("gated_activation", x, y, activation)
        yield call("gated_activation_backward", z, x, y, activation)
        yield call("gate_up_activation", torch.cat([x, y], -1), activation)
        yield call("gate_up_activation_backward", z, torch.cat([x, y], -1), activation)
    yield call("dropout_of_shard", x, 7, 0.4, 1, x.numel(), 0, x.numel())
    yield call("dropout_of_shard", x, -7, 0.4, columns, rows, 2, rows + 5)

    mean = random(rows, kind=accumulator)
    rstd = random(rows, kind=accumulator).abs() + 0.5
    empty = torch.empty(0, dtype=accumulator)
    for kind in dict.fromkeys((dtype, accumulator)):
        weight, bias = random(columns, kind=kind), random(columns, kind=kind)
        yield call("norm", x, None, weight, None, False, 1e-6)
        yield call("norm", x, y, weight, bias, True, 1e-5)
        yield call("norm_backward", y, z, x, weight, empty, rstd, False, True, 1)
        yield call("norm_backward", y, None, x, weight, mean, rstd, True, True, 2)
    yield call("norm", x, None, None, None, True, 1e-5)
    yield call("norm_backward", y, None, x, None, empty, rstd, False, True, 0)

    target = torch.randint(-1, columns + 2, (rows,), generator=generator)  # also classes of other ranks, and ignored
    normalizers = torch.stack([random(rows, kind=accumulator).abs() + 2, random(rows, kind=accumulator).abs() + 0.1])
    for smoothing in (0.0, 0.1):
        yield call("cross_entropy_statistics", x, target, 0, -1, smoothing > 0)
        yield call(
            "cross_entropy_gradient",
            torch.zeros_like(x),
            random(rows, kind=accumulator),
            x,
            target,
            normalizers,
            0,
            columns + 2,
            -1,
            smoothing,
            changed=(0,),
        )


def _optimizer_calls(
    rows: int, columns: int, dtype: torch.dtype, unaligned: bool, generator: torch.Generator
) -> Iterator[KernelCall]:
    """Yield exact formats for float32; for bfloat16 those that round, where devices may differ by one code."""

    def random(kind: torch.dtype) -> Tensor:
        return torch.randn((rows, columns), generator=generator).to(kind)

    def call(name: str, operator: str, *args: object, changed: tuple[int, ...] = (), **options: object) -> KernelCall:
        return KernelCall(name, args, changed, unaligned, operator, options)

    x = random(torch.float32)
    place = {"step": 3, "seed": -7, "row": 2, "column": 3, "full_columns": columns + 5}
    kinds: tuple[torch.dtype, ...] = ()
    if dtype is torch.float32:
        kinds = (torch.float32,)
        for low_dtype in (torch.int16, torch.int8):
            yield call("float_codes", "split_float", x, low_dtype)
            yield call("float_codes", "join_float", *torch.ops.weft.split_float(x, low_dtype))
    elif dtype is torch.bfloat16:
        kinds = (torch.bfloat16, torch.int8)
        for is_signed in (True, False):
            yield call("float_codes", "quantize_blocks", x, is_signed)
            yield call("float_codes", "dequantize_blocks", *torch.ops.weft.quantize_blocks(x, is_signed))
    for kind in kinds:
        first, second = random(torch.float32), random(torch.float32).abs()
        first_scale = second_scale = None
        if kind is torch.int8:
            first, first_scale = torch.ops.weft.quantize_blocks(first, True)
            second, second_scale = torch.ops.weft.quantize_blocks(second, False)
        else:
            first, second = first.to(kind), second.to(kind)
        for low_dtype in (None,) if kind is torch.float32 else (None, torch.int16, torch.int8):
            weight, low_bits = x.to(dtype), None
            if low_dtype is not None:
                weight, low_bits = torch.ops.weft.split_float(x, low_dtype)
            states = (first, first_scale, second, second_scale, low_bits)
            adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
            yield call(
                *("adam_step", "adam_step_", weight, random(dtype), *states),
                changed=(0, 2, 3, 4, 5, 6),
                decoupled_weight_decay=True,
                **adam,
                **place,
            )
            momentum = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}
            yield call(
                *("momentum_step", "momentum_step_", weight, random(dtype), first, first_scale, low_bits),
                changed=(0, 2, 3, 4),
                nesterov=False,
                maximize=True,
                **momentum,
                **place,
            )
