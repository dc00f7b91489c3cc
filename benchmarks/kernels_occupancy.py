"""The launches of the CUDA kernels: threads of a block, theoretical occupancy, bytes moved against the minimum."""

from __future__ import annotations

from dataclasses import dataclass

from kernels_binary import RESERVED_SHARED_BYTES, Kernel

WARP_SIZE = 32
REGISTER_GRANULARITY = 256  # registers are allocated to a warp in multiples of this
WARP_GRANULARITY = 4  # the registers of a multiprocessor are divided into those of 4 schedulers
SHARED_GRANULARITY = 128  # bytes


@dataclass(frozen=True)
class Limits:
    """The limits of a multiprocessor, and of one block's shared memory."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int
    shared_bytes_of_block: int


# From the table of technical specifications per compute capability in the CUDA programming guide; the granularities
# above are those of the header cuda_occupancy.h of the CUDA toolkit.
LIMITS = {
    "sm_80": Limits(64, 32, 65536, 164 << 10, 163 << 10),
    "sm_90": Limits(64, 32, 65536, 228 << 10, 227 << 10),
}

# The largest block of each kernel: the constants of kernels/cuda that tests/benchmarks/test_kernels_static.py names.
THREADS = {
    "activation": 256,
    "adam_step": 256,
    "cross_entropy_gradient": 256,
    "cross_entropy_statistics": 1024,
    "dequantize_blocks": 256,
    "dropout": 256,
    "momentum_step": 256,
    "norm_backward": 512,
    "norm_forward": 512,
    "quantize_blocks": 256,
    "split_float": 256,
    "sum_blocks": 1024,
}


@dataclass(frozen=True)
class Occupancy:
    """The blocks that fit on a multiprocessor at once, and what limits their number."""

    blocks: int
    share: float  # of the warps that a multiprocessor can hold
    limit: str


def occupancy(kernel: Kernel) -> Occupancy | None:
    """Return the theoretical occupancy with the kernel's largest block, or None if the limits are unknown."""
    limits = LIMITS.get(kernel.arch.rstrip("af"))
    if limits is None:
        return None
    shared_bytes = kernel.shared_bytes + dynamic_shared_bytes(kernel, limits)
    return occupancy_of(kernel.registers, threads_of(kernel), shared_bytes, limits)


def threads_of(kernel: Kernel) -> int:
    """Return the number of threads of the kernel's largest block."""
    if kernel.family not in THREADS:
        raise ValueError(
            f"got the kernel '{kernel.family}', whose block size is not known: add it to THREADS in "
            "benchmarks/kernels_occupancy.py."
        )
    return THREADS[kernel.family]


def dynamic_shared_bytes(kernel: Kernel, limits: Limits) -> int:
    """Return the most dynamic shared memory that a launch requests, as in run_backward() of norm_launch.cu."""
    if kernel.family != "norm_backward" or kernel.kept_packs:
        return 0
    return min(limits.shared_bytes_of_block, limits.shared_bytes // 2) - 2048


def occupancy_of(registers: int, threads: int, shared_bytes: int, limits: Limits) -> Occupancy:
    """Return the theoretical occupancy of a kernel with these resources."""
    warps = -(-threads // WARP_SIZE)
    registers_of_warp = _round_up(registers * WARP_SIZE, REGISTER_GRANULARITY)
    warps_by_registers = limits.registers // registers_of_warp // WARP_GRANULARITY * WARP_GRANULARITY
    shared_bytes_of_block = _round_up(shared_bytes + RESERVED_SHARED_BYTES, SHARED_GRANULARITY)
    blocks = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared_bytes // shared_bytes_of_block,
    }
    limit = min(blocks, key=blocks.__getitem__)
    return Occupancy(blocks[limit], blocks[limit] * warps / limits.warps, limit)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Traffic:
    """The array accesses of an operation for each element of its input, in elements of the storage type.

    Parameters, statistics of rows and partial sums are not counted.
    """

    operation: str
    family: str
    loads: int
    stores: int
    minimum: int  # accesses, if each array is read or written once

    def bytes_of(self, element_bytes: int) -> tuple[int, int]:
        """Return the bytes that the kernel's instructions move, and the minimum."""
        return (self.loads + self.stores) * element_bytes, self.minimum * element_bytes


# Read from the kernels. Where `loads` + `stores` exceed the minimum, the same thread reads the same pack again.
TRAFFIC = [
    Traffic("activation", "activation", 1, 1, 2),
    Traffic("activation backward", "activation", 2, 2, 4),
    Traffic("gated activation", "activation", 2, 1, 3),
    Traffic("gated activation backward", "activation", 3, 3, 6),
    Traffic("dropout", "dropout", 1, 1, 2),
    Traffic("rms_norm, layer_norm", "norm_forward", 1, 1, 2),
    Traffic("add_rms_norm, add_layer_norm", "norm_forward", 2, 2, 4),
    Traffic("rms_norm of long rows", "norm_forward k0", 2, 1, 2),
    Traffic("layer_norm of long rows", "norm_forward k0", 3, 1, 2),
    Traffic("add_rms_norm of long rows", "norm_forward k0", 3, 2, 4),
    Traffic("add_layer_norm of long rows", "norm_forward k0", 4, 2, 4),
    Traffic("rms_norm, layer_norm backward", "norm_backward", 2, 1, 3),
    Traffic("add_rms_norm, add_layer_norm backward", "norm_backward", 3, 1, 4),
    Traffic("rms_norm, layer_norm backward of long rows", "norm_backward k0", 4, 1, 3),
    Traffic("add_rms_norm, add_layer_norm backward of long rows", "norm_backward k0", 5, 1, 4),
    Traffic("cross_entropy, statistics", "cross_entropy_statistics", 1, 0, 1),
    Traffic("cross_entropy, gradient", "cross_entropy_gradient", 1, 1, 2),
]
