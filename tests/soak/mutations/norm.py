"""Faults in the norms' kernels."""

from __future__ import annotations

from soak.mutations.mutation import Mutation

KERNEL = "cuda/norm_launch.cu"
ROWS = "cuda/norm_rows.cuh"

STEP = "static_cast<int64_t>(blockDim.x) * kWidth;"
ROW_LOOP = "row < job.num_rows; row += gridDim.x"
ROW_BEGIN = "const int64_t row_begin = row * job.row_size;"
COLUMNS = "column = threadIdx.x * int64_t{kWidth}; column < job.row_size; column += step"
FIRST_COLUMN = COLUMNS.replace("threadIdx.x * int64_t{kWidth}", "threadIdx.x")
ONE_TOO_MANY = COLUMNS.replace("column < job.row_size", "column <= job.row_size")
TOO_FAR = COLUMNS.replace("+= step", "+= step + kWidth")
BARRIER = "__syncthreads();\n"
FRESH = "the kernel's entry allocates this tensor, and allocations are aligned"
BLOCKS = "std::min<int64_t>(job.num_rows, num_multiprocessors(device) * per_multiprocessor)"

MUTATIONS = [
    # Forward.
    Mutation("norm_forward_step", KERNEL, STEP, "static_cast<int64_t>(blockDim.x);", 1, 2),
    Mutation("norm_forward_row_stride", KERNEL, ROW_LOOP, ROW_LOOP + " + 1", 1, 2),
    Mutation("norm_forward_row_bound", KERNEL, ROW_LOOP, ROW_LOOP.replace("<", "<="), 1, 2),
    Mutation("norm_forward_row_offset", KERNEL, ROW_BEGIN, ROW_BEGIN.replace("row *", "blockIdx.x *"), 1, 2),
    Mutation("norm_forward_int32", KERNEL, ROW_BEGIN, ROW_BEGIN.replace("int64_t", "int"), 1, 2),
    Mutation("norm_forward_source", KERNEL, "job.residual == nullptr ? job.x : job.sum", "job.x"),
    Mutation("norm_forward_residual_unchecked", KERNEL, "if (job.residual != nullptr)", "if (true)"),
    Mutation("norm_forward_first_pass_begin", KERNEL, COLUMNS, FIRST_COLUMN, 1, 4),
    Mutation("norm_forward_first_pass_bound", KERNEL, COLUMNS, ONE_TOO_MANY, 1, 4),
    Mutation("norm_forward_first_pass_stride", KERNEL, COLUMNS, TOO_FAR, 1, 4),
    Mutation("norm_forward_second_pass_bound", KERNEL, COLUMNS, ONE_TOO_MANY, 2, 4),
    Mutation("norm_forward_second_pass_stride", KERNEL, COLUMNS, TOO_FAR, 2, 4),
    Mutation("norm_forward_third_pass_bound", KERNEL, COLUMNS, ONE_TOO_MANY, 3, 4),
    Mutation("norm_forward_third_pass_stride", KERNEL, COLUMNS, TOO_FAR, 3, 4),
    Mutation(
        "norm_sum_not_rounded",
        KERNEL,
        "static_cast<Scalar>(static_cast<Storage>(v[i] + residual[i]))",
        "v[i] + residual[i]",
    ),
    Mutation("norm_sum_not_stored", KERNEL, "        store_pack<Storage>(job.sum, row_begin + column, v);\n", ""),
    Mutation("norm_mean_of_sum", KERNEL, "block_sum(total, shared) / size;", "block_sum(total, shared);"),
    Mutation("norm_squares_not_reset", KERNEL, "      squares = 0;\n", ""),
    Mutation("norm_squares_not_centered", KERNEL, "(v[i] - mean) * (v[i] - mean);", "v[i] * v[i];"),
    Mutation("norm_squares_cancel", KERNEL, "(v[i] - mean) * (v[i] - mean);", "v[i] * v[i] - mean * mean;"),
    Mutation("norm_no_eps", KERNEL, " + static_cast<Scalar>(job.eps)", ""),
    Mutation(
        "norm_unbiased_variance", KERNEL, "block_sum(squares, shared) / size", "block_sum(squares, shared) / (size - 1)"
    ),
    Mutation("norm_rstd_of_row_0", KERNEL, "(job.rstd)[row] = rstd", "(job.rstd)[0] = rstd"),
    Mutation("norm_mean_of_row_0", KERNEL, "(job.mean)[row] = mean", "(job.mean)[0] = mean"),
    Mutation(
        "norm_rms_mean", KERNEL, "if (job.centered) static_cast<Scalar*>(job.mean)", "static_cast<Scalar*>(job.mean)"
    ),
    Mutation(
        "norm_bias_identity",
        KERNEL,
        "load_params<Params>(job.bias, column, Scalar(0)",
        "load_params<Params>(job.bias, column, Scalar(1)",
    ),
    Mutation(
        "norm_forward_weight_identity",
        KERNEL,
        "load_params<Params>(job.weight, column, Scalar(1)",
        "load_params<Params>(job.weight, column, Scalar(0)",
        1,
        3,
    ),
    Mutation(
        "norm_forward_weight_column",
        KERNEL,
        "load_params<Params>(job.weight, column,",
        "load_params<Params>(job.weight, 0,",
        1,
        3,
    ),
    Mutation("norm_no_bias", KERNEL, "* rstd * weight[i] + bias[i]", "* rstd * weight[i]"),
    # Backward.
    Mutation("norm_backward_row_stride", KERNEL, ROW_LOOP, ROW_LOOP + " + 1", 2, 2),
    Mutation("norm_backward_int32", KERNEL, ROW_BEGIN, ROW_BEGIN.replace("int64_t", "int"), 2, 2),
    Mutation("norm_backward_barrier_after_zero", KERNEL, "  " + BARRIER + "  for (int64_t row", "  for (int64_t row"),
    Mutation(
        "norm_backward_barrier_before_copy",
        KERNEL,
        "  if (sums_are_shared) {\n    " + BARRIER,
        "  if (sums_are_shared) {\n",
    ),
    Mutation("norm_backward_not_zeroed", KERNEL, "shared_sums[i] = 0;", ";"),
    Mutation("norm_backward_segment_not_zeroed", KERNEL, "segment[i] = 0;", ";"),
    Mutation("norm_backward_zero_bound", KERNEL, "i < num_params * job.row_size;", "i < job.row_size;"),
    Mutation("norm_backward_zero_stride", KERNEL, "i += blockDim.x", "i += blockDim.x + 1"),
    Mutation(
        "norm_backward_segment", KERNEL, "+ blockIdx.x * num_params * job.row_size", "+ blockIdx.x * job.row_size"
    ),
    Mutation(
        "norm_backward_element_stride",
        KERNEL,
        "shared_sums + pack, num_packs, grad_weight",
        "shared_sums + pack, num_packs + 1, grad_weight",
    ),
    Mutation(
        "norm_backward_pack_place", KERNEL, "shared_sums + pack, num_packs, grad_weight", "shared_sums, 1, grad_weight"
    ),
    Mutation(
        "norm_backward_segment_stride", KERNEL, "segment + column, 1, grad_weight", "segment + column, 2, grad_weight"
    ),
    Mutation(
        "norm_backward_segment_place", KERNEL, "segment + column, 1, grad_weight", "segment + pack, 1, grad_weight"
    ),
    Mutation("norm_backward_pack_bound", KERNEL, "pack < num_packs;", "pack <= num_packs;"),
    Mutation("norm_backward_pack_loop_stride", KERNEL, "pack += blockDim.x", "pack += blockDim.x + 1"),
    Mutation("norm_backward_column", KERNEL, "const int64_t column = pack * kWidth;", "const int64_t column = pack;"),
    Mutation("norm_backward_bias_place", KERNEL, "shared_sums + job.row_size + pack", "shared_sums + pack"),
    Mutation("norm_backward_bias_place_in_segment", KERNEL, "segment + job.row_size + column", "segment + column"),
    Mutation("norm_backward_unwanted_bias", KERNEL, "if (num_params > 1)", "if (num_params > 0)", 1, 2),
    Mutation("norm_backward_unwanted_bias_in_segment", KERNEL, "if (num_params > 1)", "if (num_params > 0)", 2, 2),
    Mutation("norm_backward_unwanted_weight", KERNEL, "if (num_params > 0) add_strided(seg", "add_strided(seg"),
    Mutation(
        "norm_backward_overwrites_sums", KERNEL, "sums[i * stride] += values[i];", "sums[i * stride] = values[i];"
    ),
    Mutation(
        "norm_backward_wrong_memory",
        KERNEL,
        "      if (sums_are_shared) {\n        if",
        "      if (true) {\n        if",
    ),
    Mutation("norm_backward_unwanted_input", KERNEL, "    if (job.grad_v == nullptr) continue;\n", ""),
    Mutation(
        "norm_backward_rms_mean",
        KERNEL,
        "job.centered ? block_sum(sum_g, shared) / size : Scalar(0)",
        "block_sum(sum_g, shared) / size",
    ),
    Mutation(
        "norm_backward_saved_mean",
        KERNEL,
        "job.centered ? static_cast<const Scalar*>(job.mean)[row] : Scalar(0)",
        "Scalar(0)",
    ),
    Mutation("norm_backward_no_projection", KERNEL, " - mean_g - n * mean_gn)", " - mean_g)"),
    Mutation("norm_backward_sum_of_gn", KERNEL, "block_sum(sum_gn, shared) / size;", "block_sum(sum_gn, shared);"),
    Mutation(
        "norm_backward_weight_identity",
        KERNEL,
        "load_params<Params>(job.weight, column, Scalar(1)",
        "load_params<Params>(job.weight, column, Scalar(0)",
        2,
        3,
    ),
    Mutation("norm_backward_bound", KERNEL, COLUMNS, ONE_TOO_MANY, 4, 4),
    Mutation("norm_backward_stride", KERNEL, COLUMNS, TOO_FAR, 4, 4),
    Mutation("norm_backward_grad_sum_unchecked", KERNEL, "if (job.grad_sum != nullptr) {", "if (true) {"),
    Mutation("norm_backward_no_grad_sum", KERNEL, "        if (job.grad_sum != nullptr) v[i] += grad_sum[i];\n", ""),
    Mutation("norm_backward_copy_stride", KERNEL, "column += blockDim.x", "column += blockDim.x + 1"),
    Mutation(
        "norm_backward_copy_order",
        KERNEL,
        "sums[begin + (column / kWidth) + (column % kWidth) * num_packs]",
        "sums[begin + column]",
    ),
    # The sums over blocks.
    Mutation(
        "norm_blocks_int32",
        KERNEL,
        "static_cast<int64_t>(blockIdx.x) * kWarpSize",
        "static_cast<int>(blockIdx.x) * kWarpSize",
        unseen="needs a row of 2^31 features",
    ),
    Mutation("norm_blocks_barrier", KERNEL, "= total;\n  " + BARRIER, "= total;\n"),
    Mutation("norm_blocks_stride", KERNEL, "block += blockDim.y", "block += blockDim.y + 1"),
    Mutation("norm_blocks_bound", KERNEL, "block < num_blocks;", "block <= num_blocks;"),
    Mutation("norm_blocks_row", KERNEL, "partial_sums[block * num_columns + column]", "partial_sums[column]"),
    Mutation("norm_blocks_counted_twice", KERNEL, "for (int other = 1;", "for (int other = 0;"),
    Mutation(
        "norm_blocks_last_left_out",
        KERNEL,
        "other < static_cast<int>(blockDim.y);",
        "other < static_cast<int>(blockDim.y) - 1;",
    ),
    Mutation("norm_blocks_column_unchecked", KERNEL, "threadIdx.y == 0 && column < num_columns", "threadIdx.y == 0"),
    Mutation(
        "norm_blocks_first_columns_only", KERNEL, "(num_columns + kWarpSize - 1) / kWarpSize", "num_columns / kWarpSize"
    ),
    Mutation("norm_blocks_launched_for_nothing", KERNEL, "  if (num_params == 0) return;\n", ""),
    Mutation("norm_shared_bytes_of_double", KERNEL, "StorageType::kFloat64 ? 8 : 4", "StorageType::kFloat64 ? 4 : 4"),
    Mutation("norm_shared_always", KERNEL, "num_params > 0 && sums_bytes <= max_shared_bytes", "num_params > 0"),
    Mutation(
        "norm_shared_never",
        KERNEL,
        "num_params > 0 && sums_bytes <= max_shared_bytes",
        "false",
        equivalent="sums in the segment are the same; only the speed differs",
    ),
    Mutation(
        "norm_shared_not_allowed",
        KERNEL,
        "kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(max_shared_bytes)",
        "kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 0",
    ),
    # How rows are distributed.
    Mutation("params_unchecked", ROWS, "if (params != nullptr)", "if (true)"),
    Mutation("params_in_wrong_type", ROWS, "job.params_in_compute_type ||", "true ||"),
    Mutation("half_elements_of_4_bytes", ROWS, "return 2;", "return 4;"),
    Mutation("float_elements_of_8_bytes", ROWS, "return 4;", "return 8;"),
    Mutation("packable_row_size", ROWS, "job.row_size % width == 0 && ", ""),
    Mutation("packable_half_a_pack", ROWS, "job.row_size % width ==", "job.row_size % (width / 2) =="),
    Mutation("packable_arrays", ROWS, "is_vector_aligned(arrays) && ", ""),
    Mutation("packable_weight", ROWS, " && weight % (2 * kVectorBytes) == 0", ""),
    Mutation("packable_weight_to_16_bytes", ROWS, "weight % (2 * kVectorBytes)", "weight % kVectorBytes"),
    Mutation("packable_bias", ROWS, "bias % (2 * kVectorBytes) == 0 && ", ""),
    Mutation("packable_bias_to_16_bytes", ROWS, "bias % (2 * kVectorBytes)", "bias % kVectorBytes"),
    Mutation("packable_x", ROWS, "{job.x, job.residual,", "{job.residual,"),
    Mutation("packable_residual", ROWS, "{job.x, job.residual,", "{job.x,"),
    Mutation("packable_results", ROWS, "job.residual, job.sum, job.y}", "job.residual}", equivalent=FRESH),
    Mutation("packable_grad_y", ROWS, "{job.grad_y, job.grad_sum,", "{job.grad_sum,"),
    Mutation("packable_grad_sum", ROWS, "{job.grad_y, job.grad_sum,", "{job.grad_y,"),
    Mutation("packable_v", ROWS, "job.v, job.grad_v}", "job.grad_v}"),
    Mutation("norm_half_a_warp", ROWS, "int threads = kWarpSize;", "int threads = kWarpSize / 2;"),
    Mutation(
        "norm_always_packed",
        ROWS,
        "packable ? visit.template run<Storage, ScalarOf",
        "true ? visit.template run<Storage, ScalarOf",
    ),
    Mutation(
        "norm_storage_params_always_packed",
        ROWS,
        "packable ? visit.template run<Storage, Storage",
        "true ? visit.template run<Storage, Storage",
    ),
    Mutation(
        "norm_unlimited_forward_blocks",
        ROWS,
        BLOCKS,
        "num_multiprocessors(device) * per_multiprocessor",
        1,
        2,
        equivalent="blocks without rows do nothing; only the speed differs",
    ),
    Mutation(
        "norm_unlimited_backward_blocks",
        ROWS,
        BLOCKS,
        "num_multiprocessors(device) * per_multiprocessor",
        2,
        2,
        equivalent="blocks without rows add zeros; only the speed differs",
    ),
    Mutation(
        "norm_more_threads",
        ROWS,
        "threads < num_packs) threads",
        "threads <= num_packs) threads",
        equivalent="threads without columns add zeros; only the speed differs",
    ),
]
