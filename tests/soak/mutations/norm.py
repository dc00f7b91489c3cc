"""Faults in the norms' kernels."""

from __future__ import annotations

from soak.mutations.mutation import Mutation

LAUNCH = "cuda/norm_launch.cu"
FORWARD = "cuda/norm_forward.cuh"
BACKWARD = "cuda/norm_backward.cuh"
SUMS = "cuda/norm_param_sums.cuh"
KEPT = "cuda/kept_packs.cuh"
ROWS = "cuda/norm_rows.cuh"

ROW_LOOP = "row < job.num_rows; row += gridDim.x"
ROW_BEGIN = "const int64_t row_begin = row * job.row_size;"
KEPT_PLACE = "threadIdx.x + i * blockDim.x);"
READ_LOOP = "int64_t pack = threadIdx.x; pack < num_packs; pack += blockDim.x"
WEIGHT = "load_params<Params>(job.weight, column, Scalar(1)"
COLUMN = "const int64_t column = pack * kWidth;"
NEXT = "if (row + gridDim.x < job.num_rows) next.load(job, row + gridDim.x, num_packs);"
SHARED_IF = "kPacks == 0 && num_params > 0 && sums_bytes <= max_shared_bytes"
BARRIER = "__syncthreads();\n"
WHOLE_WARPS = "(num_threads + kWarpSize - 1) / kWarpSize * kWarpSize"
KEPT_BOUND = "int64_t{kept_packs} * kMaxThreads"
FRESH = "the kernel's entry allocates this tensor, and allocations are aligned"
BLOCKS = "std::min<int64_t>(job.num_rows, num_multiprocessors(device) * per_multiprocessor)"

KEPT_PACKS = [
    # The packs of a thread.
    Mutation("kept_count", KEPT, "i < kPacks; ++i", "i < kPacks - 1; ++i"),
    Mutation("kept_place_without_index", KEPT, KEPT_PLACE, "threadIdx.x);"),
    Mutation("kept_place_without_thread", KEPT, KEPT_PLACE, "i * blockDim.x);"),
    Mutation("kept_place_stride", KEPT, KEPT_PLACE, "threadIdx.x + i * (blockDim.x + 1));"),
    Mutation("kept_unbounded", KEPT, "if (pack < num_packs) visit", "visit"),
    Mutation("kept_bound", KEPT, "if (pack < num_packs) visit", "if (pack <= num_packs) visit"),
    Mutation("kept_one_too_few", KEPT, "if (pack < num_packs) visit", "if (pack < num_packs - 1) visit"),
    Mutation("kept_visit_of_first", KEPT, "visit(i, int64_t{pack})", "visit(0, int64_t{pack})"),
    Mutation("kept_visit_of_thread", KEPT, "visit(i, int64_t{pack})", "visit(i, int64_t{threadIdx.x})"),
    Mutation("read_begin", KEPT, READ_LOOP, READ_LOOP.replace("= threadIdx.x", "= 0")),
    Mutation("read_bound", KEPT, READ_LOOP, READ_LOOP.replace("pack <", "pack <=")),
    Mutation("read_one_too_few", KEPT, READ_LOOP, READ_LOOP.replace("num_packs", "num_packs - 1")),
    Mutation("read_stride", KEPT, READ_LOOP, READ_LOOP + " + 1"),
    # Their values.
    Mutation("kept_load_place", KEPT, "pack * kWidth);", "pack);"),
    Mutation("kept_load_row", KEPT, "(data) + begin +", "(data) +"),
    Mutation("kept_load_to_first", KEPT, "packs_[i] = *reinterpret_cast", "packs_[0] = *reinterpret_cast"),
    Mutation("kept_get_of_first", KEPT, "(packs_[i]);", "(packs_[0]);"),
    Mutation("kept_get_first_element", KEPT, "(pack.values[j]);", "(pack.values[0]);"),
    Mutation("read_get_offset", KEPT, "load_pack<Storage>(data, begin, out);", "load_pack<Storage>(data, 0, out);"),
    Mutation("kept_set_of_first", KEPT, "packs_[i] = std::bit_cast", "packs_[0] = std::bit_cast"),
    Mutation("kept_set_first_element", KEPT, "(values[j]);", "(values[0]);"),
    Mutation("kept_set_nothing", KEPT, "      packs_[i] = std::bit_cast<Words>(pack);\n", ""),
    Mutation(
        "kept_unaligned_words",
        KEPT,
        "alignas(kVectorBytes) ",
        "",
        equivalent="the alignment lets nvcc use one instruction; values are the same",
    ),
]

FORWARD_PASSES = [
    Mutation("norm_forward_row_stride", FORWARD, ROW_LOOP, ROW_LOOP + " + 1"),
    Mutation("norm_forward_row_bound", FORWARD, ROW_LOOP, ROW_LOOP.replace("<", "<=")),
    Mutation("norm_forward_row_offset", FORWARD, ROW_BEGIN, ROW_BEGIN.replace("row *", "blockIdx.x *")),
    Mutation("norm_forward_int32", FORWARD, ROW_BEGIN, ROW_BEGIN.replace("int64_t", "int")),
    Mutation("norm_forward_packs", FORWARD, "job.row_size / kWidth;", "job.row_size / kWidth - 1;"),
    Mutation("norm_forward_source", FORWARD, "job.residual == nullptr ? job.x : job.sum", "job.x"),
    Mutation("norm_forward_kept_row_0", FORWARD, "values.load(job.x, row_begin,", "values.load(job.x, 0,"),
    Mutation(
        "norm_forward_residual_row_0",
        FORWARD,
        "residuals.load(job.residual, row_begin,",
        "residuals.load(job.residual, 0,",
    ),
    Mutation("norm_forward_residual_of_x", FORWARD, "residuals.load(job.residual,", "residuals.load(job.x,"),
    Mutation("norm_forward_load_unchecked", FORWARD, "if (job.residual != nullptr) residuals", "residuals"),
    Mutation("norm_forward_residual_unchecked", FORWARD, "if (job.residual != nullptr) {", "if (true) {"),
    Mutation("norm_forward_sum_begin", FORWARD, "row_begin + pack * kWidth;", "row_begin + pack;"),
    Mutation("norm_forward_x_of_first", FORWARD, "values.get(i, job.x,", "values.get(0, job.x,"),
    Mutation("norm_forward_residual_of_first", FORWARD, "residuals.get(i,", "residuals.get(0,"),
    Mutation("norm_forward_wrong_residual", FORWARD, "residuals.get(i, job.residual,", "values.get(i, job.x,"),
    Mutation(
        "norm_sum_not_rounded",
        FORWARD,
        "static_cast<Scalar>(static_cast<Storage>(v[j] + residual[j]))",
        "v[j] + residual[j]",
    ),
    Mutation("norm_sum_not_stored", FORWARD, "        store_pack<Storage>(job.sum, begin, v);\n", ""),
    Mutation("norm_sum_not_kept", FORWARD, "        values.set(i, v);\n", ""),
    Mutation("norm_sum_kept_first", FORWARD, "values.set(i, v);", "values.set(0, v);"),
    Mutation("norm_total_overwritten", FORWARD, "total += v[j];", "total = v[j];"),
    Mutation("norm_squares_overwritten", FORWARD, "squares += v[j] * v[j];", "squares = v[j] * v[j];"),
    Mutation("norm_mean_of_sum", FORWARD, "block_sum(total, shared) / size;", "block_sum(total, shared);"),
    Mutation("norm_squares_not_reset", FORWARD, "      squares = 0;\n", ""),
    Mutation("norm_squares_not_centered", FORWARD, "(v[j] - mean) * (v[j] - mean);", "v[j] * v[j];"),
    Mutation("norm_squares_cancel", FORWARD, "(v[j] - mean) * (v[j] - mean);", "v[j] * v[j] - mean * mean;"),
    Mutation(
        "norm_squares_of_first",
        FORWARD,
        "values.get(i, source, row_begin + pack",
        "values.get(0, source, row_begin + pack",
    ),
    Mutation("norm_squares_place", FORWARD, "row_begin + pack * kWidth, v);", "row_begin + pack, v);"),
    Mutation("norm_no_eps", FORWARD, " + static_cast<Scalar>(job.eps)", ""),
    Mutation(
        "norm_unbiased_variance",
        FORWARD,
        "block_sum(squares, shared) / size",
        "block_sum(squares, shared) / (size - 1)",
    ),
    Mutation("norm_rstd_of_row_0", FORWARD, "(job.rstd)[row] = rstd", "(job.rstd)[0] = rstd"),
    Mutation("norm_mean_of_row_0", FORWARD, "(job.mean)[row] = mean", "(job.mean)[0] = mean"),
    Mutation(
        "norm_rms_mean", FORWARD, "if (job.centered) static_cast<Scalar*>(job.mean)", "static_cast<Scalar*>(job.mean)"
    ),
    Mutation("norm_forward_column", FORWARD, COLUMN, "const int64_t column = pack;"),
    Mutation(
        "norm_forward_values_of_first",
        FORWARD,
        "values.get(i, source, row_begin + column",
        "values.get(0, source, row_begin + column",
    ),
    Mutation("norm_forward_values_place", FORWARD, "source, row_begin + column,", "source, column,"),
    Mutation("norm_forward_weight_identity", FORWARD, WEIGHT, WEIGHT.replace("(1)", "(0)")),
    Mutation("norm_forward_weight_column", FORWARD, WEIGHT, WEIGHT.replace("column", "0")),
    Mutation(
        "norm_bias_identity",
        FORWARD,
        "load_params<Params>(job.bias, column, Scalar(0)",
        "load_params<Params>(job.bias, column, Scalar(1)",
    ),
    Mutation("norm_bias_column", FORWARD, "load_params<Params>(job.bias, column,", "load_params<Params>(job.bias, 0,"),
    Mutation("norm_no_bias", FORWARD, "* rstd * weight[j] + bias[j]", "* rstd * weight[j]"),
    Mutation("norm_y_place", FORWARD, "(job.y, row_begin + column, v)", "(job.y, column, v)"),
]

BACKWARD_PASSES = [
    Mutation("norm_backward_row_stride", BACKWARD, ROW_LOOP, ROW_LOOP + " + 1"),
    Mutation("norm_backward_row_bound", BACKWARD, ROW_LOOP, ROW_LOOP.replace("<", "<=")),
    Mutation("norm_backward_int32", BACKWARD, ROW_BEGIN, ROW_BEGIN.replace("int64_t", "int")),
    Mutation("norm_backward_packs", BACKWARD, "job.row_size / kWidth;", "job.row_size / kWidth - 1;"),
    Mutation(
        "norm_backward_segment", BACKWARD, "+ blockIdx.x * num_params * job.row_size", "+ blockIdx.x * job.row_size"
    ),
    Mutation("norm_backward_barrier_after_zero", BACKWARD, "  " + BARRIER + "  for (int64_t row", "  for (int64_t row"),
    # The loads of a row, and of the next one.
    Mutation("norm_backward_load_int32", BACKWARD, "const int64_t begin = row *", "const int begin = row *"),
    Mutation("norm_backward_load_row_0", BACKWARD, "int64_t begin = row * job.row_size;", "int64_t begin = 0;"),
    Mutation("norm_backward_grads_of_v", BACKWARD, "grads.load(job.grad_y,", "grads.load(job.v,"),
    Mutation("norm_backward_values_of_grads", BACKWARD, "values.load(job.v,", "values.load(job.grad_y,"),
    Mutation("norm_backward_rstd_of_row_0", BACKWARD, "(job.rstd)[row];", "(job.rstd)[0];"),
    Mutation("norm_backward_mean_of_row_0", BACKWARD, "(job.mean)[row] :", "(job.mean)[0] :"),
    Mutation(
        "norm_backward_saved_mean",
        BACKWARD,
        "job.centered ? static_cast<const Scalar*>(job.mean)[row] : Scalar(0)",
        "Scalar(0)",
    ),
    Mutation("norm_backward_rms_saved_mean", BACKWARD, "mean = job.centered ?", "mean = true ?"),
    Mutation("norm_backward_first_row", BACKWARD, "next.load(job, blockIdx.x,", "next.load(job, 0,"),
    Mutation("norm_backward_no_first_row", BACKWARD, "if (blockIdx.x < job.num_rows)", "if (false)"),
    Mutation(
        "norm_backward_first_row_unchecked",
        BACKWARD,
        "if (blockIdx.x < job.num_rows)",
        "if (true)",
        equivalent="no launch has more blocks than rows",
    ),
    Mutation("norm_backward_no_current", BACKWARD, "    current = next;\n", ""),
    Mutation(
        "norm_backward_current_after_next", BACKWARD, "current = next;\n    " + NEXT, NEXT + "\n    current = next;"
    ),
    Mutation("norm_backward_next_unchecked", BACKWARD, NEXT, NEXT.replace("row + gridDim.x < job.num_rows", "true")),
    Mutation("norm_backward_next_bound", BACKWARD, NEXT, NEXT.replace("<", "<=")),
    Mutation("norm_backward_next_too_few", BACKWARD, NEXT, NEXT.replace("x <", "x + 1 <")),
    Mutation("norm_backward_no_next", BACKWARD, NEXT, NEXT.replace("row + gridDim.x < job.num_rows", "false")),
    Mutation("norm_backward_next_of_row", BACKWARD, NEXT, NEXT.replace("(job, row + gridDim.x,", "(job, row,")),
    Mutation("norm_backward_next_neighbour", BACKWARD, NEXT, NEXT.replace("(job, row + gridDim.x,", "(job, row + 1,")),
    Mutation("norm_backward_rstd_of_next", BACKWARD, "rstd = current.rstd;", "rstd = next.rstd;"),
    Mutation("norm_backward_mean_of_next", BACKWARD, "mean = current.mean;", "mean = next.mean;"),
    Mutation("norm_backward_grads_of_next", BACKWARD, "current.grads.get(", "next.grads.get(", 1, 2),
    Mutation("norm_backward_values_of_next", BACKWARD, "current.values.get(", "next.values.get(", 1, 2),
    Mutation("norm_backward_second_grads_of_next", BACKWARD, "current.grads.get(", "next.grads.get(", 2, 2),
    Mutation("norm_backward_second_values_of_next", BACKWARD, "current.values.get(", "next.values.get(", 2, 2),
    Mutation("norm_backward_grad_sum_row_0", BACKWARD, "(job.grad_sum, row_begin, num", "(job.grad_sum, 0, num"),
    Mutation("norm_backward_load_unchecked", BACKWARD, "if (job.grad_sum != nullptr) grad_sums.load", "grad_sums.load"),
    # The sums of a row.
    Mutation("norm_backward_column", BACKWARD, COLUMN, "const int64_t column = pack;", 1, 2),
    Mutation("norm_backward_grads_of_first", BACKWARD, "current.grads.get(i,", "current.grads.get(0,", 1, 2),
    Mutation("norm_backward_values_of_first", BACKWARD, "current.values.get(i,", "current.values.get(0,", 1, 2),
    Mutation("norm_backward_weight_identity", BACKWARD, WEIGHT, WEIGHT.replace("(1)", "(0)"), 1, 2),
    Mutation("norm_backward_weight_column", BACKWARD, WEIGHT, WEIGHT.replace("column", "0"), 1, 2),
    Mutation("norm_backward_sum_overwritten", BACKWARD, "sums.first += grad", "sums.first = grad"),
    Mutation("norm_backward_second_sum_overwritten", BACKWARD, "sums.second += grad", "sums.second = grad"),
    Mutation("norm_backward_sums_swapped", BACKWARD, "sums.first += grad", "sums.second += grad"),
    Mutation("norm_backward_sum_without_weight", BACKWARD, "grad_y[j] * weight[j] * n;", "grad_y[j] * n;"),
    Mutation("norm_backward_grad_weight", BACKWARD, "grad_weight[j] = grad_y[j] * n;", "grad_weight[j] = grad_y[j];"),
    Mutation(
        "norm_backward_params_swapped", BACKWARD, "(i, pack, grad_weight, grad_y)", "(i, pack, grad_y, grad_weight)"
    ),
    Mutation("norm_backward_params_of_first", BACKWARD, "param_sums.add(i,", "param_sums.add(0,"),
    Mutation("norm_backward_unwanted_input", BACKWARD, "    if (job.grad_v == nullptr) continue;\n", ""),
    Mutation("norm_backward_mean_of_g", BACKWARD, "totals.first / size :", "totals.first :"),
    Mutation("norm_backward_mean_of_gn", BACKWARD, "totals.second / size;", "totals.second;"),
    Mutation("norm_backward_totals_swapped", BACKWARD, "totals.second / size;", "totals.first / size;"),
    Mutation(
        "norm_backward_rms_mean", BACKWARD, "job.centered ? totals.first / size : Scalar(0)", "totals.first / size"
    ),
    # The gradient of a row.
    Mutation("norm_backward_second_column", BACKWARD, COLUMN, "const int64_t column = pack;", 2, 2),
    Mutation("norm_backward_second_grads_of_first", BACKWARD, "current.grads.get(i,", "current.grads.get(0,", 2, 2),
    Mutation("norm_backward_second_values_of_first", BACKWARD, "current.values.get(i,", "current.values.get(0,", 2, 2),
    Mutation("norm_backward_second_weight_identity", BACKWARD, WEIGHT, WEIGHT.replace("(1)", "(0)"), 2, 2),
    Mutation("norm_backward_second_weight_column", BACKWARD, WEIGHT, WEIGHT.replace("column", "0"), 2, 2),
    Mutation("norm_backward_no_projection", BACKWARD, " - mean_g - n * mean_gn)", " - mean_g)"),
    Mutation("norm_backward_no_mean", BACKWARD, " - mean_g - n * mean_gn)", " - n * mean_gn)"),
    Mutation("norm_backward_no_rstd", BACKWARD, "v[j] = rstd * (", "v[j] = ("),
    Mutation(
        "norm_backward_grad_sum_unchecked", BACKWARD, "if (job.grad_sum != nullptr) grad_sums.get", "grad_sums.get"
    ),
    Mutation("norm_backward_grad_sum_of_first", BACKWARD, "grad_sums.get(i,", "grad_sums.get(0,"),
    Mutation("norm_backward_grad_sum_place", BACKWARD, "job.grad_sum, row_begin + column,", "job.grad_sum, column,"),
    Mutation("norm_backward_no_grad_sum", BACKWARD, "        if (job.grad_sum != nullptr) v[j] += grad_sum[j];\n", ""),
    Mutation("norm_backward_grad_place", BACKWARD, "(job.grad_v, row_begin + column, v)", "(job.grad_v, column, v)"),
    Mutation("norm_backward_sums_not_stored", BACKWARD, "  param_sums.store();\n", ""),
]

PARAM_SUMS = [
    # In registers.
    Mutation("norm_sums_weight_not_added", SUMS, "      weight_[i][j] += grad_weight[j];\n", ""),
    Mutation("norm_sums_bias_not_added", SUMS, "      bias_[i][j] += grad_bias[j];\n", ""),
    Mutation("norm_sums_weight_overwritten", SUMS, "weight_[i][j] +=", "weight_[i][j] ="),
    Mutation("norm_sums_bias_overwritten", SUMS, "bias_[i][j] +=", "bias_[i][j] ="),
    Mutation("norm_sums_weight_to_first", SUMS, "weight_[i][j] +=", "weight_[0][j] +="),
    Mutation("norm_sums_bias_to_first", SUMS, "bias_[i][j] +=", "bias_[0][j] +="),
    Mutation("norm_sums_weight_of_one_element", SUMS, "+= grad_weight[j];", "+= grad_weight[0];"),
    Mutation("norm_sums_bias_of_weight", SUMS, "bias_[i][j] += grad_bias[j];", "bias_[i][j] += grad_weight[j];"),
    Mutation("norm_sums_weight_column", SUMS, "segment_, pack * kWidth, weight_", "segment_, pack, weight_"),
    Mutation("norm_sums_bias_column", SUMS, "row_size_ + pack * kWidth, bias_", "row_size_ + pack, bias_"),
    Mutation("norm_sums_bias_place", SUMS, "row_size_ + pack * kWidth, bias_", "pack * kWidth, bias_"),
    Mutation("norm_sums_weight_from_first", SUMS, "pack * kWidth, weight_[i]", "pack * kWidth, weight_[0]"),
    Mutation("norm_sums_bias_from_first", SUMS, "pack * kWidth, bias_[i]", "pack * kWidth, bias_[0]"),
    Mutation("norm_sums_bias_is_weight", SUMS, "pack * kWidth, bias_[i]", "pack * kWidth, weight_[i]"),
    Mutation("norm_sums_unwanted_weight", SUMS, "if (num_params_ > 0) store_pack", "store_pack"),
    Mutation("norm_sums_unwanted_bias", SUMS, "if (num_params_ > 1) store_pack", "if (num_params_ > 0) store_pack"),
    Mutation("norm_sums_no_bias", SUMS, "if (num_params_ > 1) store_pack", "if (num_params_ > 2) store_pack"),
    Mutation("norm_sums_weight_not_zeroed", SUMS, "weight_[kPacks][kWidth] = {};", "weight_[kPacks][kWidth];"),
    Mutation("norm_sums_bias_not_zeroed", SUMS, "bias_[kPacks][kWidth] = {};", "bias_[kPacks][kWidth];"),
    # In memory.
    Mutation("norm_sums_overwritten", SUMS, "= old[j] + values[j];", "= values[j];"),
    Mutation("norm_sums_not_added", SUMS, "= old[j] + values[j];", "= old[j];"),
    Mutation("norm_sums_load_stride", SUMS, "old[j] = sums[j * stride];", "old[j] = sums[j];"),
    Mutation("norm_sums_store_stride", SUMS, "sums[j * stride] = old", "sums[j] = old"),
    Mutation("norm_sums_not_zeroed", SUMS, "shared_[i] = 0;", ";"),
    Mutation("norm_sums_segment_not_zeroed", SUMS, "segment_[i] = 0;", ";"),
    Mutation("norm_sums_zero_bound", SUMS, "i < num_params * row_size;", "i < row_size;"),
    Mutation("norm_sums_zero_stride", SUMS, "i += blockDim.x", "i += blockDim.x + 1"),
    Mutation(
        "norm_sums_element_stride",
        SUMS,
        "shared_ + pack, num_packs_, grad_weight",
        "shared_ + pack, num_packs_ + 1, grad_weight",
    ),
    Mutation("norm_sums_pack_place", SUMS, "shared_ + pack, num_packs_, grad_weight", "shared_, 1, grad_weight"),
    Mutation("norm_sums_segment_stride", SUMS, "segment_ + pack * kWidth, 1,", "segment_ + pack * kWidth, 2,"),
    Mutation("norm_sums_segment_place", SUMS, "segment_ + pack * kWidth, 1,", "segment_ + pack, 1,"),
    Mutation("norm_sums_shared_bias_place", SUMS, "shared_ + row_size_ + pack", "shared_ + pack"),
    Mutation("norm_sums_segment_bias_place", SUMS, "segment_ + row_size_ + pack * kWidth", "segment_ + pack * kWidth"),
    Mutation("norm_sums_unwanted_shared_bias", SUMS, "> 1) add_strided(shared_", "> 0) add_strided(shared_"),
    Mutation("norm_sums_unwanted_segment_bias", SUMS, "> 1) add_strided(segment_", "> 0) add_strided(segment_"),
    Mutation(
        "norm_sums_unwanted_segment_weight", SUMS, "if (num_params_ > 0) add_strided(segment_", "add_strided(segment_"
    ),
    Mutation("norm_sums_wrong_memory", SUMS, "    if (sums_are_shared_) {\n", "    if (true) {\n"),
    Mutation("norm_sums_zeros_in_wrong_memory", SUMS, "      if (sums_are_shared) {\n", "      if (true) {\n"),
    Mutation("norm_sums_copy_unchecked", SUMS, "    if (!sums_are_shared_) return;\n", ""),
    Mutation("norm_sums_never_copied", SUMS, "if (!sums_are_shared_) return;", "return;"),
    Mutation("norm_sums_barrier_before_copy", SUMS, "    " + BARRIER, ""),
    Mutation("norm_sums_copy_weight_only", SUMS, "begin = param * row_size_;", "begin = 0;"),
    Mutation("norm_sums_copy_bound", SUMS, "column < row_size_;", "column < row_size_ - 1;"),
    Mutation("norm_sums_copy_stride", SUMS, "column += blockDim.x", "column += blockDim.x + 1"),
    Mutation(
        "norm_sums_copy_order",
        SUMS,
        "shared_[begin + (column / kWidth) + (column % kWidth) * num_packs_]",
        "shared_[begin + column]",
    ),
    # Over blocks.
    Mutation(
        "norm_blocks_int32",
        BACKWARD,
        "static_cast<int64_t>(blockIdx.x) * kWarpSize",
        "static_cast<int>(blockIdx.x) * kWarpSize",
        unseen="needs a row of 2^31 features",
    ),
    Mutation("norm_blocks_barrier", BACKWARD, "= total;\n  " + BARRIER, "= total;\n"),
    Mutation("norm_blocks_stride", BACKWARD, "block += blockDim.y", "block += blockDim.y + 1"),
    Mutation("norm_blocks_bound", BACKWARD, "block < num_blocks;", "block <= num_blocks;"),
    Mutation("norm_blocks_row", BACKWARD, "partial_sums[block * num_columns + column]", "partial_sums[column]"),
    Mutation("norm_blocks_counted_twice", BACKWARD, "for (int other = 1;", "for (int other = 0;"),
    Mutation(
        "norm_blocks_last_left_out",
        BACKWARD,
        "other < static_cast<int>(blockDim.y);",
        "other < static_cast<int>(blockDim.y) - 1;",
    ),
    Mutation("norm_blocks_column_unchecked", BACKWARD, "threadIdx.y == 0 && column < num_columns", "threadIdx.y == 0"),
    Mutation("norm_blocks_load_unchecked", BACKWARD, "if (column < num_columns) {", "if (true) {"),
    Mutation(
        "norm_blocks_first_columns_only", LAUNCH, "(num_columns + kWarpSize - 1) / kWarpSize", "num_columns / kWarpSize"
    ),
    Mutation("norm_blocks_launched_for_nothing", LAUNCH, "  if (num_params == 0) return;\n", ""),
    Mutation("norm_blocks_one_too_few", LAUNCH, "                num_blocks,\n", "                num_blocks - 1,\n"),
    Mutation(
        "norm_blocks_more_than_segments",
        LAUNCH,
        "num_blocks = num_backward_blocks(job, device);",
        "num_blocks = num_backward_blocks(job, device) + 1;",
    ),
    Mutation(
        "norm_blocks_fewer_segments",
        LAUNCH,
        "return num_backward_blocks(job, device);",
        "return num_backward_blocks(job, device) - 1;",
    ),
    # Their shared memory.
    Mutation("norm_shared_bytes_of_double", LAUNCH, "StorageType::kFloat64 ? 8 : 4", "StorageType::kFloat64 ? 4 : 4"),
    Mutation("norm_shared_always", LAUNCH, SHARED_IF, "kPacks == 0 && num_params > 0"),
    Mutation(
        "norm_shared_never",
        LAUNCH,
        SHARED_IF,
        "false",
        equivalent="sums in the segment are the same; only the speed differs",
    ),
    Mutation(
        "norm_shared_for_kept_rows",
        LAUNCH,
        SHARED_IF,
        "num_params > 0 && sums_bytes <= max_shared_bytes",
        equivalent="rows that are kept have their sums in registers and leave the memory unused",
    ),
    Mutation("norm_shared_no_bytes", LAUNCH, "(sums_are_shared ? sums_bytes : 0)", "(0)"),
    Mutation(
        "norm_shared_not_allowed",
        LAUNCH,
        "kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(max_shared_bytes)",
        "kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 0",
    ),
]

ROW_SHAPES = [
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
    Mutation(
        "norm_packs_rounded_down",
        ROWS,
        "(job.row_size + width - 1) / width",
        "job.row_size / width",
        equivalent="rows that are not whole packs have packs of one element",
    ),
    # The threads of a block.
    Mutation(
        "keeping_threads_rounded_down", ROWS, "(num_packs + kept_packs - 1) / kept_packs", "num_packs / kept_packs"
    ),
    Mutation("keeping_warps_rounded_down", ROWS, WHOLE_WARPS, "num_threads / kWarpSize * kWarpSize"),
    Mutation("keeping_part_of_a_warp", ROWS, WHOLE_WARPS, "num_threads"),
    Mutation("keeping_one_warp_less", ROWS, WHOLE_WARPS, WHOLE_WARPS + " - (num_threads > 64 ? 32 : 0)"),
    Mutation("reading_half_a_warp", ROWS, "int num_threads = kWarpSize;", "int num_threads = kWarpSize / 2;"),
    Mutation("reading_unlimited_threads", ROWS, "num_threads < kMaxThreads && ", ""),
    Mutation(
        "reading_more_threads",
        ROWS,
        "num_threads < num_packs) num_threads",
        "num_threads <= num_packs) num_threads",
    ),
    # Which rows are kept.
    Mutation("keeps_unpackable", ROWS, "return is_packable(job) && num_packs <=", "return num_packs <="),
    Mutation("keeps_one_more", ROWS, KEPT_BOUND, KEPT_BOUND + " + 1"),
    Mutation("keeps_all", ROWS, "num_packs <= " + KEPT_BOUND, "true"),
    Mutation("keeps_one_pack", ROWS, "keeping_shape(num_packs, kept_packs)\n", "keeping_shape(num_packs, 1)\n"),
    Mutation("keeps_one_pack_more", ROWS, "(num_packs, kept_packs)\n", "(num_packs, kept_packs + 1)\n"),
    Mutation("forward_shape_of_backward", ROWS, "row_shape(job, kForwardPacks)", "row_shape(job, kForwardPacks + 1)"),
    Mutation("backward_shape_of_forward", ROWS, "row_shape(job, kBackwardPacks)", "row_shape(job, kForwardPacks)"),
    # Which kernel runs.
    Mutation("norm_always_packed", ROWS, "packable ? visit", "true ? visit"),
    Mutation("norm_never_packed", ROWS, "packable ? visit", "!packable ? visit"),
    Mutation(
        "norm_unpacked_rows_kept", ROWS, "run<Storage, Params, 1, 0>", "run<Storage, Params, kWidth, kForwardPacks>"
    ),
    Mutation("norm_all_kept", ROWS, "if (is_kept) return", "if (packable) return"),
    Mutation("norm_kept_read", ROWS, "if (is_kept) return", "if (false) return"),
    Mutation("norm_forward_kernel_of_two_packs", LAUNCH, "visit_shapes<kForwardPacks>", "visit_shapes<2>"),
    Mutation("norm_backward_kernel_of_one_pack", LAUNCH, "visit_shapes<kBackwardPacks>", "visit_shapes<1>"),
    # The number of blocks.
    Mutation(
        "norm_forward_no_block",
        ROWS,
        "int kKeepingForwardThreads = 768",
        "int kKeepingForwardThreads = kMaxThreads / 2",
    ),
    Mutation(
        "norm_backward_no_block",
        ROWS,
        "int kKeepingBackwardThreads = kMaxThreads",
        "int kKeepingBackwardThreads = kMaxThreads / 2",
    ),
    Mutation(
        "norm_unlimited_forward_blocks",
        ROWS,
        BLOCKS,
        "num_multiprocessors(device) * per_multiprocessor",
        1,
        2,
    ),
    Mutation(
        "norm_unlimited_backward_blocks",
        ROWS,
        BLOCKS,
        "num_multiprocessors(device) * per_multiprocessor",
        2,
        2,
    ),
]

MUTATIONS = [*KEPT_PACKS, *FORWARD_PASSES, *BACKWARD_PASSES, *PARAM_SUMS, *ROW_SHAPES]
