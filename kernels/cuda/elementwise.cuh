#pragma once

#include "launch.cuh"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>

// Launches jobs whose elements are independent of each other. An `Operation` supplies:
//
//   struct Operation {
//     using Storage = ...;  // element type of all arrays
//     // Processes elements [begin, begin + kWidth); `begin` is a multiple of kWidth.
//     template <int kWidth>
//     static __device__ void run(const Job& job, int64_t begin);
//   };
namespace weft::kernels::cuda {

inline constexpr int kElementwiseThreads = 256;
inline constexpr int kElementwiseBlocksPerMultiprocessor = 8;

// Processes kWidth elements at a time and the remainder one by one.
template <typename Operation, int kWidth, typename Job>
__global__ void __launch_bounds__(kElementwiseThreads, kMinBlocks<typename Operation::Storage>)
    elementwise_kernel(const Job job) {
  const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t num_packs = job.num_elements / kWidth;
  for (int64_t pack_idx = thread_idx; pack_idx < num_packs; pack_idx += num_threads) {
    Operation::template run<kWidth>(job, pack_idx * kWidth);
  }
  if constexpr (kWidth > 1) {
    const int64_t rest_idx = num_packs * kWidth + thread_idx;
    if (rest_idx < job.num_elements) Operation::template run<1>(job, rest_idx);
  }
}

template <typename Operation, int kWidth, typename Job>
void launch_elementwise_width(const Job& job, c10::Device device) {
  const int64_t num_packs = (job.num_elements + kWidth - 1) / kWidth;
  const int64_t num_blocks =
      std::min<int64_t>((num_packs + kElementwiseThreads - 1) / kElementwiseThreads,
                        int64_t{num_multiprocessors(device)} * kElementwiseBlocksPerMultiprocessor);
  launch_kernel(elementwise_kernel<Operation, kWidth, Job>,
                {static_cast<unsigned>(num_blocks), kElementwiseThreads},
                c10::cuda::getCurrentCUDAStream(device.index()),
                job);
}

// Launches on the current stream of `device`, in packs of kVectorBytes if `is_packable`.
// REQUIRES: the job has elements, and a CUDAGuard for `device` is active.
template <typename Operation, typename Job>
void launch_elementwise(const Job& job, bool is_packable, c10::Device device) {
  constexpr int kWidth = kVectorBytes / sizeof(typename Operation::Storage);
  is_packable ? launch_elementwise_width<Operation, kWidth>(job, device)
              : launch_elementwise_width<Operation, 1>(job, device);
}

}  // namespace weft::kernels::cuda
