"""Faults in the cross-entropy's kernels."""

from __future__ import annotations

from soak.mutations.mutation import Mutation

KERNEL = "cuda/cross_entropy_launch.cu"
JOB = "src/cross_entropy_job.h"

STRIDED_ROW = "static_cast<const Storage*>(job.logits) + row * job.row_stride"
SHORT = "fewer elements lie outside of the packs than a block has threads, so the loop does not repeat"

MUTATIONS = [
    # The division of a row into packs.
    Mutation("packs_alignment", KERNEL, "% (kWidth * sizeof(Storage));", "% (kWidth * sizeof(Storage) / 2);"),
    Mutation(
        "packs_short_row", KERNEL, "elements_to_boundary < size ? elements_to_boundary : size;", "elements_to_boundary;"
    ),
    Mutation(
        "packs_missing_off_by_one", KERNEL, "(kWidth - static_cast<int64_t>(", "(kWidth + 1 - static_cast<int64_t>("
    ),
    Mutation(
        "packs_rounded_up", KERNEL, "(size - packs_begin) / kWidth *", "(size - packs_begin + kWidth - 1) / kWidth *"
    ),
    Mutation("packs_head_bound", KERNEL, "i < packs_begin;", "i <= packs_begin;"),
    Mutation("packs_head_one_too_few", KERNEL, "i < packs_begin;", "i < packs_begin - 1;"),
    Mutation(
        "packs_head_stride",
        KERNEL,
        "i < packs_begin; i += num_threads",
        "i < packs_begin; i += num_threads + 1",
        equivalent=SHORT,
    ),
    Mutation("packs_begin", KERNEL, "packs_begin + thread_idx * kWidth;", "packs_begin + thread_idx;"),
    Mutation("packs_bound", KERNEL, "i < packs_end;", "i <= packs_end;"),
    Mutation("packs_stride", KERNEL, "i += num_threads * kWidth", "i += (num_threads + 1) * kWidth"),
    Mutation("packs_tail_begin", KERNEL, "packs_end + thread_idx;", "packs_end + 1 + thread_idx;"),
    Mutation("packs_tail_bound", KERNEL, "i < row_end;", "i <= row_end;"),
    Mutation("packs_tail_one_too_few", KERNEL, "i < row_end;", "i < row_end - 1;"),
    Mutation(
        "packs_tail_stride",
        KERNEL,
        "i < row_end; i += num_threads",
        "i < row_end; i += num_threads + 1",
        equivalent=SHORT,
    ),
    # The online softmax.
    Mutation("larger_without_nan", KERNEL, "a > b || a != a ? a : b", "a > b ? a : b"),
    Mutation("larger_is_smaller", KERNEL, "a > b || a != a ? a : b", "a < b || a != a ? a : b"),
    Mutation("shift_of_infinity", KERNEL, "largest == -kInfinity<Scalar> ? Scalar(0) : largest", "largest"),
    Mutation("online_identity_of_max", KERNEL, "Scalar largest = -kInfinity<Scalar>;", "Scalar largest = 0;"),
    Mutation(
        "online_identity_of_sum",
        KERNEL,
        "Scalar sum = 0;",
        "Scalar sum = 1;",
        equivalent="a sum without logits has the largest logit -infinity, so add() and merges multiply it by 0",
    ),
    Mutation("online_pack_max", KERNEL, "for (int i = 1; i < kWidth; ++i)", "for (int i = 1; i < kWidth - 1; ++i)"),
    Mutation("online_nan", KERNEL, "if (!(pack_max <= largest))", "if (pack_max > largest)"),
    Mutation("online_no_rescaling", KERNEL, "      sum *= ::exp(largest - grown);\n", ""),
    Mutation("online_no_shift", KERNEL, "::exp(logits[i] - shift)", "::exp(logits[i])"),
    Mutation("shuffle_own_sum", KERNEL, "cuda::shuffle_xor(value.sum, offset)", "value.sum"),
    Mutation("merge_no_rescaling_of_first", KERNEL, "a.sum * ::exp(a.largest - shift)", "a.sum"),
    Mutation("merge_no_rescaling_of_second", KERNEL, "b.sum * ::exp(b.largest - shift)", "b.sum"),
    # The statistics.
    Mutation("statistics_row_stride", KERNEL, "row += gridDim.x", "row += gridDim.x + 1"),
    Mutation(
        "statistics_row_bound", KERNEL, "row = blockIdx.x; row < job.num_rows", "row = blockIdx.x; row <= job.num_rows"
    ),
    Mutation("statistics_row_offset", KERNEL, STRIDED_ROW, STRIDED_ROW.replace("row_stride", "row_size"), 1, 2),
    Mutation("statistics_int32_offset", KERNEL, STRIDED_ROW, STRIDED_ROW.replace("row *", "int(row) * (int)"), 1, 2),
    Mutation(
        "statistics_wrong_sums",
        KERNEL,
        "for (int i = 0; i < kPack; ++i) total",
        "for (int i = 1; i < kPack; ++i) total",
    ),
    Mutation("statistics_no_reduction", KERNEL, "if (job.wants_sum) total = block_sum(total, shared);", ""),
    Mutation("statistics_unwanted_sum", KERNEL, "job.wants_sum ? total : Scalar(0)", "total"),
    Mutation("statistics_other_shard", KERNEL, "column < 0 ? Scalar(0) :", "false ? Scalar(0) :"),
    Mutation("statistics_place", KERNEL, "(job.statistics) + row * 4", "(job.statistics) + row * 3"),
    Mutation(
        "statistics_shared_size",
        KERNEL,
        "__shared__ Scalar shared[kWarpSize]",
        "__shared__ Scalar shared[kWarpSize / 2]",
    ),
    Mutation("statistics_too_many_threads", KERNEL, "kMaxStatisticsThreads = 1024", "kMaxStatisticsThreads = 2048"),
    Mutation("statistics_half_a_warp", KERNEL, "int threads = kWarpSize;", "int threads = kWarpSize / 2;"),
    Mutation(
        "statistics_unlimited_blocks",
        KERNEL,
        "std::min(job.num_rows, num_resident)",
        "job.num_rows",
        equivalent="a block for each row; only the speed differs",
    ),
    # The gradient.
    Mutation("gradient_row_stride", KERNEL, "row += gridDim.y", "row += gridDim.y + 1"),
    Mutation("gradient_too_many_rows", KERNEL, "std::min(job.num_rows, kMaxGridRows)", "job.num_rows"),
    Mutation(
        "gradient_block_offset", KERNEL, "static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x", "threadIdx.x"
    ),
    Mutation("gradient_num_threads", KERNEL, "static_cast<int64_t>(gridDim.x) * blockDim.x", "blockDim.x"),
    Mutation("gradient_row_offset", KERNEL, STRIDED_ROW, STRIDED_ROW.replace("row_stride", "row_size"), 2, 2),
    Mutation("gradient_int32_offset", KERNEL, STRIDED_ROW, STRIDED_ROW.replace("row *", "int(row) * (int)"), 2, 2),
    Mutation(
        "gradient_int32_thread",
        KERNEL,
        "const int64_t thread_idx = static_cast<int64_t>(",
        "const int thread_idx = static_cast<int>(",
        unseen="needs a row of 2^33 packs, more than a device's memory",
    ),
    Mutation(
        "gradient_int32_result",
        KERNEL,
        "(job.grad_logits) + row * job.row_size",
        "(job.grad_logits) + int(row) * int(job.row_size)",
    ),
    Mutation(
        "gradient_result_stride",
        KERNEL,
        "(job.grad_logits) + row * job.row_size",
        "(job.grad_logits) + row * job.row_stride",
    ),
    Mutation("gradient_of_ignored", KERNEL, "job.targets.is_ignored(row)", "false"),
    Mutation(
        "gradient_sum_of_normalizers", KERNEL, "(values[i] - largest) - log_sum", "values[i] - (largest + log_sum)"
    ),
    Mutation("gradient_no_log_sum", KERNEL, "(values[i] - largest) - log_sum", "values[i] - largest"),
    Mutation("gradient_no_smoothing", KERNEL, "p - smoothing_per_class;", "p;"),
    Mutation("gradient_target_offset", KERNEL, "static_cast<Scalar>(1 - job.smoothing)", "Scalar(1)"),
    Mutation("gradient_target_column", KERNEL, "column + i == target", "column == target"),
    Mutation("gradient_no_loss", KERNEL, ": grad) * grad_loss", ": grad)"),
    Mutation("gradient_wrong_loss", KERNEL, "(job.grad_losses)[row]", "(job.grad_losses)[0]"),
    Mutation("gradient_wrong_max", KERNEL, "(job.largest)[row]", "(job.largest)[0]"),
    Mutation("gradient_alignment_of_rows", KERNEL, " && strides_apart % kVectorBytes == 0", ""),
    Mutation("gradient_alignment_of_arrays", KERNEL, "apart % kVectorBytes == 0 && strides", "strides"),
    Mutation("gradient_launch_packs", KERNEL, "(row_size + kWidth - 1) / kWidth", "row_size / kWidth"),
    Mutation("gradient_always_packed", KERNEL, "is_packable<Storage>(job) ?", "true ?"),
    # Targets.
    Mutation("target_ignored_in_shard", JOB, "id != ignore_index && id >= vocab_start", "id >= vocab_start"),
    Mutation("target_bound", JOB, "id - vocab_start < row_size", "id - vocab_start <= row_size"),
    Mutation("target_last_class", JOB, "id - vocab_start < row_size", "id - vocab_start < row_size - 1"),
    Mutation("target_without_start", JOB, "? id - vocab_start : -1", "? id : -1"),
    Mutation("target_ignored_row", JOB, "target[row] == ignore_index", "target[0] == ignore_index"),
    Mutation(
        "target_below_shard",
        JOB,
        "id >= vocab_start && ",
        "",
        equivalent="column() is negative instead of -1, and the kernels test only whether it is negative",
    ),
]
