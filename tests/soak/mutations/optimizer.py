"""Faults in the optimizer steps' kernels.

The suite computes its expected values with low_precision.h and optimizer_math.h, so only tests/ops finds faults there.
"""

from __future__ import annotations

from soak.mutations.mutation import Mutation

KERNEL = "cuda/optimizer_step_launch.cu"
BLOCKS = "cuda/code_blocks.cuh"
FORMATS = "cuda/float_formats.cuh"

MUTATIONS = [
    # The blocks and packs of a warp.
    Mutation("step_block_stride", BLOCKS, "idx += gridDim.x * warps_per_block", "idx += gridDim.x"),
    Mutation("step_block_bound", BLOCKS, "idx < num_blocks;", "idx < num_blocks - 1;"),
    Mutation("step_blocks_of_row", BLOCKS, "+ detail::kCodeBlock - 1) /", ") /"),
    Mutation("step_block_begin", BLOCKS, "row * job.row_size + column, size", "row * job.row_size, size"),
    Mutation("step_block_size", BLOCKS, "left < detail::kCodeBlock ? left :", "false ? left :"),
    Mutation("step_lane_bound", BLOCKS, "offset < block.size", "offset <= block.size"),
    Mutation("step_lane_offset", BLOCKS, "i * kWarpSize + lane * kWidth", "i * kWarpSize + lane"),
    Mutation("step_warp_max", BLOCKS, "value = other > value ? other : value", "value = other"),
    Mutation("step_grid", BLOCKS, "(num_warps + kWarps - 1) / kWarps", "num_warps / kWarps + 0 * kWarps"),
    # The formats.
    Mutation("step_split8_shift", FORMATS, "lower[i] *= 256", "lower[i] *= 128"),
    Mutation("step_split8_low", FORMATS, "is_narrow ? value.low >> 8 : value.low", "value.low"),
    Mutation(
        "step_wide_loads",
        FORMATS,
        "load_pack<Storage>(data, begin + first, part)",
        "load_pack<Storage>(data, begin, part)",
    ),
    Mutation(
        "step_wide_stores",
        FORMATS,
        "store_pack<Storage>(data, begin + first, part)",
        "store_pack<Storage>(data, begin, part)",
    ),
    Mutation(
        "step_weights_as_split8",
        FORMATS,
        "job.low_bits, job.weight_format == Format::kSplit8, begin, out",
        "job.low_bits, true, begin, out",
    ),
    Mutation("step_code_signs", FORMATS, "kIsSigned ? detail::from_s", "!kIsSigned ? detail::from_s"),
    # The step.
    Mutation("step_scale_lane", KERNEL, "threadIdx.x % kWarpSize == 0", "threadIdx.x == 0"),
    Mutation("step_largest", KERNEL, "magnitude > largest ? magnitude", "magnitude < largest ? magnitude"),
    Mutation("step_not_finite", KERNEL, "if (!is_finite) x[j] = 0;", ""),
    Mutation("step_roots", KERNEL, "kIsSecond ? root[j] : x[j]", "kIsSecond ? x[j] : x[j]"),
    Mutation("step_random_of_bfloat16", KERNEL, "random_units<kIsSecond>", "random_units<false>", 1, 2),
    Mutation("step_random_of_codes", KERNEL, "random_units<kIsSecond>", "random_units<false>", 2, 2),
    Mutation("step_no_decay", KERNEL, "constants.grad_decay != 0", "false", 1, 2),
    Mutation("step_no_decay_of_momentum", KERNEL, "constants.grad_decay != 0", "false", 2, 2),
    Mutation("step_row_of_position", KERNEL, "job.row + block.row", "block.row"),
    Mutation("step_column_of_position", KERNEL, "job.column + block.column", "block.column"),
    Mutation("step_never_crossing", KERNEL, "word < lower_ ? next_key_ : key_", "key_"),
    Mutation("step_next_key", KERNEL, "upper + 1)", "upper)"),
    Mutation("step_lower_of_position", KERNEL, "static_cast<uint32_t>(position >> 32)", "0U"),
    Mutation("step_first_scale", KERNEL, "job.first.scales[block.idx]", "job.first.scales[0]"),
    Mutation("step_second_scale", KERNEL, "job.second.scales[block.idx]", "job.second.scales[0]"),
    Mutation("step_capture_unchecked", KERNEL, "status == cudaStreamCaptureStatusNone", "true"),
    Mutation("step_alignment_of_grad", KERNEL, "low_bits, job.grad, job.first", "low_bits, job.first"),
    Mutation(
        "step_alignment",
        KERNEL,
        "{job.parameter, job.low_bits, job.grad, job.first",
        "{job.low_bits, job.grad, job.first",
    ),
    Mutation("step_pack_crosses_row", KERNEL, "is_packable && row_size % kLaneElements == 0", "is_packable"),
    Mutation("quantize_root", KERNEL, "x[j] > 0 ? std::sqrt(x[j]) : 0.0F", "x[j]"),
    Mutation("quantize_halves", KERNEL, "0x80008000U", "0x80000000U"),
]
