"""Faults in the code that several kernels share: reductions, elementwise loops, launches and packs."""

from __future__ import annotations

from soak.mutations.mutation import Mutation

REDUCE = "cuda/block_reduce.cuh"
LOOP = "cuda/elementwise.cuh"
LAUNCH = "cuda/launch.cuh"
PACKS = "cuda/vector_access.cuh"

HALVE = "for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {"
PAIR_SHUFFLE = "cuda::shuffle_xor(value.first, offset), cuda::shuffle_xor(value.second, offset)"
PAIR_SUM = "a.first + b.first, a.second + b.second"

MUTATIONS = [
    # Reductions over a block.
    Mutation("reduce_barrier_before_write", REDUCE, "  __syncthreads();  // until", "  // until"),
    Mutation("reduce_barrier_before_read", REDUCE, "  __syncthreads();\n", ""),
    Mutation("reduce_mask", REDUCE, "0xFFFFFFFFU", "0x0000FFFFU"),
    Mutation("reduce_first_offset", REDUCE, HALVE, HALVE.replace("/ 2;", "/ 4;"), 1, 2),
    Mutation("reduce_first_last_step", REDUCE, HALVE, HALVE.replace("> 0", "> 1"), 1, 2),
    Mutation("reduce_second_offset", REDUCE, HALVE, HALVE.replace("/ 2;", "/ 4;"), 2, 2),
    Mutation("reduce_second_last_step", REDUCE, HALVE, HALVE.replace("> 0", "> 1"), 2, 2),
    Mutation("reduce_warp_slot", REDUCE, "shared[warp] = value", "shared[0] = value"),
    Mutation("reduce_identity_left_out", REDUCE, "lane < num_warps ? shared[lane] : identity", "shared[lane]"),
    Mutation("reduce_one_warp_too_many", REDUCE, "lane < num_warps ?", "lane <= num_warps ?"),
    Mutation("reduce_one_warp_too_few", REDUCE, "lane < num_warps ?", "lane < num_warps - 1 ?"),
    Mutation("reduce_sum_identity", REDUCE, "value, Scalar(0), [](", "value, Scalar(1), []("),
    Mutation("reduce_drops_operand", REDUCE, "{ return a + b; }", "{ return a; }"),
    Mutation(
        "reduce_no_shortcut_for_one_warp",
        REDUCE,
        "if (num_warps == 1) return value;",
        "",
        equivalent="the result of one warp goes through shared memory, which costs two barriers",
    ),
    # Reductions of pairs.
    Mutation(
        "reduce_pair_shuffle_swapped",
        REDUCE,
        PAIR_SHUFFLE,
        "cuda::shuffle_xor(value.second, offset), cuda::shuffle_xor(value.first, offset)",
    ),
    Mutation("reduce_pair_first_not_shuffled", REDUCE, "{cuda::shuffle_xor(value.first, offset),", "{value.first,"),
    Mutation("reduce_pair_second_not_shuffled", REDUCE, "cuda::shuffle_xor(value.second, offset)}", "value.second}"),
    Mutation("reduce_pair_swapped", REDUCE, PAIR_SUM, "a.second + b.second, a.first + b.first"),
    Mutation("reduce_pair_first_twice", REDUCE, PAIR_SUM, "a.first + b.first, a.first + b.first"),
    Mutation("reduce_pair_mixed", REDUCE, PAIR_SUM, "a.first + b.second, a.second + b.first"),
    Mutation("reduce_pair_drops_first", REDUCE, PAIR_SUM, "a.first, a.second + b.second"),
    Mutation("reduce_pair_drops_second", REDUCE, PAIR_SUM, "a.first + b.first, a.second"),
    Mutation("reduce_pair_first_identity", REDUCE, "Pair<Scalar>{0, 0}", "Pair<Scalar>{1, 0}"),
    Mutation("reduce_pair_second_identity", REDUCE, "Pair<Scalar>{0, 0}", "Pair<Scalar>{0, 1}"),
    # Elementwise loops.
    Mutation("loop_stride", LOOP, "pack_idx += num_threads", "pack_idx += num_threads + 1"),
    Mutation("loop_bound", LOOP, "pack_idx < num_packs", "pack_idx <= num_packs"),
    Mutation("loop_block_offset", LOOP, "static_cast<int64_t>(blockIdx.x) * blockDim.x +", ""),
    Mutation("loop_pack_offset", LOOP, "(job, pack_idx * kWidth)", "(job, pack_idx)"),
    Mutation("loop_packs_rounded_up", LOOP, "job.num_elements / kWidth;", "(job.num_elements + kWidth - 1) / kWidth;"),
    Mutation("loop_rest_begin", LOOP, "num_packs * kWidth + thread_idx", "num_packs + thread_idx"),
    Mutation("loop_rest_bound", LOOP, "rest_idx < job.num_elements", "rest_idx <= job.num_elements"),
    Mutation("loop_rest_one_too_few", LOOP, "rest_idx < job.num_elements", "rest_idx < job.num_elements - 1"),
    Mutation("loop_no_rest_of_pairs", LOOP, "if constexpr (kWidth > 1)", "if constexpr (kWidth > 2)"),
    Mutation("loop_launch_packs", LOOP, "(job.num_elements + kWidth - 1) / kWidth", "job.num_elements / kWidth"),
    Mutation(
        "loop_launch_blocks",
        LOOP,
        "(num_packs + kElementwiseThreads - 1) / kElementwiseThreads",
        "num_packs / kElementwiseThreads",
    ),
    Mutation("loop_always_packed", LOOP, "is_packable ? launch", "true ? launch"),
    Mutation(
        "loop_never_packed",
        LOOP,
        "is_packable ? launch",
        "false ? launch",
    ),
    Mutation(
        "loop_int32_index",
        LOOP,
        "const int64_t num_packs = job",
        "const int num_packs = job",
    ),
    Mutation(
        "loop_int32_thread",
        LOOP,
        "const int64_t thread_idx = static_cast<int64_t>(",
        "const int thread_idx = static_cast<int>(",
        equivalent="a launch has at most 8 blocks of 256 threads for each multiprocessor",
    ),
    # Launches and packs.
    Mutation("aligned_to_8_bytes", LAUNCH, "bits % kVectorBytes", "bits % (kVectorBytes / 2)"),
    Mutation("aligned_last_pointer_only", LAUNCH, "bits |= reinterpret", "bits = reinterpret"),
    Mutation("aligned_sum_of_pointers", LAUNCH, "bits |= reinterpret", "bits += reinterpret"),
    Mutation("launch_no_shared_memory", LAUNCH, "  config.dynamicSmemBytes = shape.dynamic_shared_bytes;\n", ""),
    Mutation("launch_wrong_half_type", LAUNCH, "operator()<c10::BFloat16>", "operator()<c10::Half>"),
    Mutation("pack_load_offset", PACKS, "(static_cast<const Storage*>(data) + begin)", "(data)"),
    Mutation("pack_store_offset", PACKS, "(static_cast<Storage*>(data) + begin)", "(data)"),
    Mutation("pack_load_first_only", PACKS, "(pack.values[i])", "(pack.values[0])"),
    Mutation("pack_store_first_only", PACKS, "(values[i])", "(values[0])"),
    Mutation(
        "pack_unaligned_type",
        PACKS,
        "alignas(sizeof(Storage) * kWidth) ",
        "",
        equivalent="the alignment lets nvcc use one instruction; values are the same",
    ),
]
