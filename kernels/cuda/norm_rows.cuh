#pragma once

#include "block_reduce.cuh"
#include "launch.cuh"
#include "norm_job.h"
#include "vector_access.cuh"

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

// How the rows of the norms are distributed over blocks and threads.
namespace weft::kernels::cuda {

inline constexpr int kMaxThreads = 512;
// Blocks of kMaxThreads that are resident on a multiprocessor. The forward's registers allow three,
// the shared memory of the backward allows two.
inline constexpr int kForwardBlocks = 3;
inline constexpr int kBackwardBlocks = 2;

template <typename Params, typename Scalar, int kWidth>
__device__ __forceinline__ void load_params(const void* params,
                                            int64_t column,
                                            Scalar value_if_null,
                                            Scalar (&out)[kWidth]) {
  if (params != nullptr) {
    load_pack<Params>(params, column, out);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = value_if_null;
}

// Returns the size of an element of `type`.
inline int64_t bytes_of(detail::StorageType type) {
  switch (type) {
    case detail::StorageType::kFloat64:
      return 8;
    case detail::StorageType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// Returns whether the rows of `arrays` can be accessed in packs of 16 bytes: every row begins at a
// multiple of 16 bytes. Weight and bias must be aligned to 32 bytes: if the arrays are of a half
// type, a pack of float32 parameters is 32 bytes, which the compiler loads with two instructions.
template <typename Job>
bool is_packable(const Job& job, std::initializer_list<const void*> arrays) {
  const int64_t width = kVectorBytes / bytes_of(job.type);
  const auto weight = reinterpret_cast<uintptr_t>(job.weight);
  return job.row_size % width == 0 && is_vector_aligned(arrays) && weight % (2 * kVectorBytes) == 0;
}

inline bool is_packable(const detail::NormForwardJob& job) {
  const auto bias = reinterpret_cast<uintptr_t>(job.bias);
  return bias % (2 * kVectorBytes) == 0 && is_packable(job, {job.x, job.residual, job.sum, job.y});
}

inline bool is_packable(const detail::NormBackwardJob& job) {
  return is_packable(job, {job.grad_y, job.grad_sum, job.v, job.grad_v});
}

template <typename Job>
int threads_of(const Job& job) {
  const int64_t width = is_packable(job) ? kVectorBytes / bytes_of(job.type) : 1;
  const int64_t num_packs = (job.row_size + width - 1) / width;
  int threads = kWarpSize;
  while (threads < kMaxThreads && threads < num_packs) threads *= 2;
  return threads;
}

// Returns the number of blocks of the forward: as many as can be resident, with registers for
// kForwardBlocks blocks of kMaxThreads and at most 32 blocks per multiprocessor.
template <typename Job>
int64_t num_forward_blocks(const Job& job, c10::Device device) {
  const int64_t per_multiprocessor =
      std::min<int64_t>(32, kForwardBlocks * kMaxThreads / threads_of(job));
  return std::min<int64_t>(job.num_rows, num_multiprocessors(device) * per_multiprocessor);
}

// Returns the number of blocks of the backward: half as many threads as fill the device, so that
// each block of kMaxThreads may use half of a multiprocessor's shared memory; at most 8 blocks per
// multiprocessor, because all blocks' sums are added at the end.
template <typename Job>
int64_t num_backward_blocks(const Job& job, c10::Device device) {
  const int64_t per_multiprocessor =
      std::min<int64_t>(8, kBackwardBlocks * kMaxThreads / threads_of(job));
  return std::min<int64_t>(job.num_rows, num_multiprocessors(device) * per_multiprocessor);
}

// Calls visit.run<Storage, Params, kWidth>() with the job's types and pack width.
template <typename Job, typename Visit>
void visit_types(const Job& job, const Visit& visit) {
  const bool packable = is_packable(job);
  visit_storage(job.type, [&]<typename Storage>() {
    constexpr int kWidth = kVectorBytes / sizeof(Storage);
    if (job.params_in_compute_type || std::is_same_v<Storage, ScalarOf<Storage>>) {
      packable ? visit.template run<Storage, ScalarOf<Storage>, kWidth>()
               : visit.template run<Storage, ScalarOf<Storage>, 1>();
    } else {
      packable ? visit.template run<Storage, Storage, kWidth>()
               : visit.template run<Storage, Storage, 1>();
    }
  });
}

}  // namespace weft::kernels::cuda
