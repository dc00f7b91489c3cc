#include "block_reduce.cuh"
#include "cross_entropy_launch.h"
#include "launch.cuh"
#include "vector_access.cuh"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace weft::kernels::cuda {
namespace {

using detail::CrossEntropyGradientJob;
using detail::CrossEntropyStatisticsJob;

constexpr int kMaxStatisticsThreads = 1024;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kGradientThreads = 256;
constexpr int kPacksPerThread = 4;  // if a row has that many
constexpr int64_t kMaxGridRows = 65535;

// Divides a row of any alignment into single elements before the first aligned pack, packs of
// kWidth elements, and the single elements that remain.
template <typename Storage, int kWidth>
struct RowPacks {
  __device__ __forceinline__ RowPacks(const Storage* row, int64_t size) {
    const auto bytes_past_boundary = reinterpret_cast<uintptr_t>(row) % (kWidth * sizeof(Storage));
    const auto elements_to_boundary =
        (kWidth - static_cast<int64_t>(bytes_past_boundary / sizeof(Storage))) % kWidth;
    packs_begin = elements_to_boundary < size ? elements_to_boundary : size;
    packs_end = packs_begin + (size - packs_begin) / kWidth * kWidth;
    row_end = size;
  }

  // Calls visit.operator()<width>(column) for each pack that thread `thread_idx` of `num_threads`
  // processes: the columns [column, column + width).
  template <typename Visit>
  __device__ __forceinline__ void for_each(int64_t thread_idx,
                                           int64_t num_threads,
                                           const Visit& visit) const {
    for (int64_t i = thread_idx; i < packs_begin; i += num_threads) visit.template operator()<1>(i);
    for (int64_t i = packs_begin + thread_idx * kWidth; i < packs_end; i += num_threads * kWidth) {
      visit.template operator()<kWidth>(i);
    }
    for (int64_t i = packs_end + thread_idx; i < row_end; i += num_threads) {
      visit.template operator()<1>(i);
    }
  }

  int64_t packs_begin;
  int64_t packs_end;
  int64_t row_end;
};

template <typename Scalar>
constexpr Scalar kInfinity = std::numeric_limits<Scalar>::infinity();

// Returns the larger value, or NaN if either is NaN.
template <typename Scalar>
__device__ __forceinline__ Scalar larger(Scalar a, Scalar b) {
  return a > b || a != a ? a : b;
}

// Returns the number to subtract before exp. While all logits so far are masked out (-infinity),
// that number is 0: the sum of exponentials must be 0, not NaN.
template <typename Scalar>
__device__ __forceinline__ Scalar shift_of(Scalar largest) {
  return largest == -kInfinity<Scalar> ? Scalar(0) : largest;
}

// The online softmax: the largest of the logits so far, and their sum of exp(logit - largest).
template <typename Scalar>
struct OnlineSum {
  Scalar largest = -kInfinity<Scalar>;
  Scalar sum = 0;

  template <int kWidth>
  __device__ __forceinline__ void add(const Scalar (&logits)[kWidth]) {
    Scalar pack_max = logits[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) pack_max = larger(pack_max, logits[i]);
    if (!(pack_max <= largest)) {  // larger, or NaN
      const Scalar grown = larger(pack_max, largest);
      sum *= ::exp(largest - grown);
      largest = grown;
    }
    const Scalar shift = shift_of(largest);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += ::exp(logits[i] - shift);
  }
};

template <typename Scalar>
__device__ __forceinline__ OnlineSum<Scalar> shuffle_xor(const OnlineSum<Scalar>& value,
                                                         int offset) {
  return {cuda::shuffle_xor(value.largest, offset), cuda::shuffle_xor(value.sum, offset)};
}

struct MergeOnlineSums {
  template <typename Scalar>
  __device__ __forceinline__ OnlineSum<Scalar> operator()(const OnlineSum<Scalar>& a,
                                                          const OnlineSum<Scalar>& b) const {
    const Scalar largest = larger(a.largest, b.largest);
    const Scalar shift = shift_of(largest);
    return {largest, a.sum * ::exp(a.largest - shift) + b.sum * ::exp(b.largest - shift)};
  }
};

// Each block processes one row at a time; narrow rows get a block of one warp.
template <typename Storage>
__global__ void __launch_bounds__(kMaxStatisticsThreads)
    statistics_kernel(const CrossEntropyStatisticsJob job) {
  using Scalar = ScalarOf<Storage>;
  constexpr int kWidth = kVectorBytes / sizeof(Storage);
  __shared__ Scalar shared_largest_and_sum[2 * kWarpSize];
  __shared__ Scalar shared[kWarpSize];
  auto* online_sums = reinterpret_cast<OnlineSum<Scalar>*>(shared_largest_and_sum);
  for (int64_t row = blockIdx.x; row < job.num_rows; row += gridDim.x) {
    const Storage* logits = static_cast<const Storage*>(job.logits) + row * job.row_stride;
    OnlineSum<Scalar> online;
    Scalar total = 0;
    RowPacks<Storage, kWidth>(logits, job.row_size)
        .for_each(threadIdx.x, blockDim.x, [&]<int kPack>(int64_t column) {
          Scalar values[kPack];
          load_pack<Storage>(logits, column, values);
          online.add(values);
#pragma unroll
          for (int i = 0; i < kPack; ++i) total += values[i];
        });
    online = block_reduce(online, OnlineSum<Scalar>(), MergeOnlineSums(), online_sums);
    if (job.wants_sum) total = block_sum(total, shared);
    if (threadIdx.x == 0) {
      const int64_t column = job.targets.column(row);
      Scalar* statistics = static_cast<Scalar*>(job.statistics) + row * 4;
      statistics[0] = online.largest;
      statistics[1] = online.sum;
      statistics[2] = column < 0 ? Scalar(0) : static_cast<Scalar>(logits[column]);
      statistics[3] = job.wants_sum ? total : Scalar(0);
    }
  }
}

// All blocks with the same blockIdx.y process one row at a time, together. The thread that reads an
// element of the logits also writes it, so the gradient may overwrite the logits.
template <typename Storage, int kWidth>
__global__ void __launch_bounds__(kGradientThreads, kMinBlocks<Storage>)
    gradient_kernel(const CrossEntropyGradientJob job) {
  using Scalar = ScalarOf<Storage>;
  const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const auto smoothing_per_class = static_cast<Scalar>(job.smoothing_per_class);
  const auto target_offset = static_cast<Scalar>(1 - job.smoothing);
  for (int64_t row = blockIdx.y; row < job.num_rows; row += gridDim.y) {
    const Storage* logits = static_cast<const Storage*>(job.logits) + row * job.row_stride;
    Storage* grad_logits = static_cast<Storage*>(job.grad_logits) + row * job.row_size;
    const Scalar largest = static_cast<const Scalar*>(job.largest)[row];
    const Scalar log_sum = static_cast<const Scalar*>(job.log_sum)[row];
    const Scalar grad_loss = static_cast<const Scalar*>(job.grad_losses)[row];
    const bool is_ignored = job.targets.is_ignored(row);
    const int64_t target = job.targets.column(row);
    RowPacks<Storage, kWidth>(grad_logits, job.row_size)
        .for_each(thread_idx, num_threads, [&]<int kPack>(int64_t column) {
          Scalar values[kPack] = {};
          if (!is_ignored) {
            load_pack<Storage>(logits, column, values);
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
              const Scalar p = ::exp((values[i] - largest) - log_sum);
              const Scalar grad = p - smoothing_per_class;
              values[i] = (column + i == target ? grad - target_offset : grad) * grad_loss;
            }
          }
          store_pack<Storage>(grad_logits, column, values);
        });
  }
}

template <typename Storage>
int64_t packs_of(int64_t row_size) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(Storage);
  return (row_size + kWidth - 1) / kWidth;
}

// Returns whether every row of the logits has the same address modulo kVectorBytes as the row of
// their gradient.
template <typename Storage>
bool is_packable(const CrossEntropyGradientJob& job) {
  const auto apart =
      reinterpret_cast<uintptr_t>(job.logits) - reinterpret_cast<uintptr_t>(job.grad_logits);
  const int64_t strides_apart = (job.row_stride - job.row_size) * int64_t{sizeof(Storage)};
  return apart % kVectorBytes == 0 && strides_apart % kVectorBytes == 0;
}

template <typename Storage>
void launch(const CrossEntropyStatisticsJob& job, c10::Device device, cudaStream_t stream) {
  const int64_t num_packs = packs_of<Storage>(job.row_size);
  int threads = kWarpSize;
  while (threads < kMaxStatisticsThreads && threads * kPacksPerThread < num_packs) threads *= 2;
  // At most as many blocks as the threads of a multiprocessor allow, and at most 32 on each. Rows
  // of float64 need more registers, so that fewer of their blocks are resident.
  const int64_t num_resident =
      int64_t{num_multiprocessors(device)} * std::min(32, kThreadsPerMultiprocessor / threads);
  const auto num_blocks = static_cast<unsigned>(std::min(job.num_rows, num_resident));
  launch_kernel(
      statistics_kernel<Storage>, {num_blocks, static_cast<unsigned>(threads)}, stream, job);
}

template <typename Storage>
void launch(const CrossEntropyGradientJob& job, c10::Device /*device*/, cudaStream_t stream) {
  constexpr int64_t kPacksPerBlock = int64_t{kGradientThreads} * kPacksPerThread;
  const int64_t num_blocks =
      (packs_of<Storage>(job.row_size) + kPacksPerBlock - 1) / kPacksPerBlock;
  const dim3 grid(static_cast<unsigned>(num_blocks),
                  static_cast<unsigned>(std::min(job.num_rows, kMaxGridRows)));
  constexpr int kWidth = kVectorBytes / sizeof(Storage);
  const auto kernel =
      is_packable<Storage>(job) ? gradient_kernel<Storage, kWidth> : gradient_kernel<Storage, 1>;
  launch_kernel(kernel, {grid, kGradientThreads}, stream, job);
}

template <typename Job>
void launch_on_current_stream(const Job& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  visit_storage(job.type, [&]<typename Storage>() { launch<Storage>(job, device, stream); });
}

}  // namespace

void launch_cross_entropy_statistics(const CrossEntropyStatisticsJob& job, c10::Device device) {
  launch_on_current_stream(job, device);
}

void launch_cross_entropy_gradient(const CrossEntropyGradientJob& job, c10::Device device) {
  launch_on_current_stream(job, device);
}

}  // namespace weft::kernels::cuda
