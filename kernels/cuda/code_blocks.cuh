#pragma once

#include "block_reduce.cuh"
#include "launch.cuh"
#include "low_precision.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>

// Kernels over the blocks of kCodeBlock elements that share a scale: each warp processes one block
// at a time, so a block's largest magnitude is reduced by shuffles alone. A lane keeps
// kLaneElements elements in registers.
namespace weft::kernels::cuda {

inline constexpr int kCodeThreads = 256;
inline constexpr int kCodeBlocksPerMultiprocessor = 8;
inline constexpr int kLaneElements = static_cast<int>(detail::kCodeBlock) / kWarpSize;

struct CodeBlock {
  int64_t idx;
  int64_t row;
  int64_t column;
  int64_t begin;  // index of its first element
  int size;
};

// Calls body(block) for the blocks of this warp; all lanes call alike.
template <typename Job, typename Body>
__device__ __forceinline__ void for_each_code_block(const Job& job, const Body& body) {
  const int64_t warps_per_block = kCodeThreads / kWarpSize;
  const int64_t warp = blockIdx.x * warps_per_block + threadIdx.x / kWarpSize;
  const int64_t blocks_per_row = (job.row_size + detail::kCodeBlock - 1) / detail::kCodeBlock;
  const int64_t num_blocks = job.num_rows * blocks_per_row;
  for (int64_t idx = warp; idx < num_blocks; idx += gridDim.x * warps_per_block) {
    const int64_t row = idx / blocks_per_row;
    const int64_t column = (idx - row * blocks_per_row) * detail::kCodeBlock;
    const int64_t left = job.row_size - column;
    const int size = static_cast<int>(left < detail::kCodeBlock ? left : detail::kCodeBlock);
    body(CodeBlock{idx, row, column, row * job.row_size + column, size});
  }
}

// Calls body(i, offset) for the packs of kWidth elements of this lane that lie in the block: `i` is
// the first of them in the lane's registers, `offset` its index in the block.
template <int kWidth, typename Body>
__device__ __forceinline__ void for_each_lane_pack(const CodeBlock& block, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int i = 0; i < kLaneElements; i += kWidth) {
    const int offset = i * kWarpSize + lane * kWidth;
    if (offset < block.size) body(i, offset);
  }
}

// Returns the warp's largest value, on every lane.
__device__ __forceinline__ int32_t warp_max(int32_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const int32_t other = shuffle_xor(value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// Launches `kernel` on the current stream of `device`. REQUIRES: the job has elements, and a
// CUDAGuard for `device` is active.
template <typename Job>
void launch_code_blocks(void (*kernel)(Job), const Job& job, c10::Device device) {
  constexpr int64_t kWarps = kCodeThreads / kWarpSize;
  const int64_t num_warps = job.num_rows * job.blocks_per_row();
  const int64_t num_blocks =
      std::min<int64_t>((num_warps + kWarps - 1) / kWarps,
                        int64_t{num_multiprocessors(device)} * kCodeBlocksPerMultiprocessor);
  launch_kernel(kernel,
                {static_cast<unsigned>(num_blocks), kCodeThreads},
                c10::cuda::getCurrentCUDAStream(device.index()),
                job);
}

}  // namespace weft::kernels::cuda
