#include "dropout_launch.h"
#include "philox.h"
#include "vector_access.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

namespace weft::kernels::cuda {
namespace {

using detail::DropoutJob;
using detail::StorageType;

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

// kWidth elements from `begin` on, which lie in one run; a pack of 4 or 8 whose place is a multiple
// of 4 needs a counter for each 4 of them.
template <typename Storage, int kWidth>
__device__ __forceinline__ void compute(const DropoutJob& job, int64_t begin) {
  using Scalar = ScalarOf<Storage>;
  const int64_t run = begin / job.run_size;
  const int64_t place = run * job.whole_run_size + job.run_begin + begin % job.run_size;
  const Scalar scale = static_cast<Scalar>(job.scale);
  Scalar values[kWidth];
  load_pack<Storage>(job.x, begin, values);
  detail::PhiloxBits bits{};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int64_t word = (place + i) & 3;
    if (i == 0 || word == 0) {
      bits = detail::philox(static_cast<uint64_t>((place + i) >> 2), job.seed);
    }
    const uint32_t random = word == 0   ? bits.words[0]
                            : word == 1 ? bits.words[1]
                            : word == 2 ? bits.words[2]
                                        : bits.words[3];
    values[i] = random < job.threshold ? Scalar(0) : values[i] * scale;
  }
  store_pack<Storage>(job.y, begin, values);
}

template <typename Storage, int kWidth>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const DropoutJob job) {
  const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t num_packs = job.num_elements / kWidth;
  for (int64_t pack = thread_idx; pack < num_packs; pack += num_threads) {
    compute<Storage, kWidth>(job, pack * kWidth);
  }
}

template <typename Storage, int kWidth>
void launch(const DropoutJob& job, int num_multiprocessors, cudaStream_t stream) {
  const int64_t num_packs = job.num_elements / kWidth;
  const int64_t num_blocks =
      std::min<int64_t>((num_packs + kThreads - 1) / kThreads,
                        static_cast<int64_t>(num_multiprocessors) * kBlocksPerMultiprocessor);
  dropout_kernel<Storage, kWidth><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(job);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Storage>
void launch_width(const DropoutJob& job, int num_multiprocessors, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(Storage);
  const auto pointers = reinterpret_cast<uintptr_t>(job.x) | reinterpret_cast<uintptr_t>(job.y);
  // No pack reaches over the end of a run, and so of the array.
  pointers % kVectorBytes == 0 && job.run_size % kWidth == 0
      ? launch<Storage, kWidth>(job, num_multiprocessors, stream)
      : launch<Storage, 1>(job, num_multiprocessors, stream);
}

}  // namespace

void launch_dropout(const DropoutJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  int num_multiprocessors = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device.index()));
  switch (job.type) {
    case StorageType::kFloat32:
      return launch_width<float>(job, num_multiprocessors, stream);
    case StorageType::kFloat64:
      return launch_width<double>(job, num_multiprocessors, stream);
    case StorageType::kBFloat16:
      return launch_width<c10::BFloat16>(job, num_multiprocessors, stream);
    case StorageType::kFloat16:
      return launch_width<c10::Half>(job, num_multiprocessors, stream);
  }
}

}  // namespace weft::kernels::cuda
