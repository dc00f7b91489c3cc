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
// The packs of a row that a thread keeps in registers, if the row has few enough. More packs need
// fewer threads for a row, so that more rows are in flight and barriers wait for fewer warps.
inline constexpr int kForwardPacks = 4;
inline constexpr int kBackwardPacks = 2;
// The threads that can be resident on a multiprocessor, by the registers of the compiled kernels.
// The shared memory of a backward that keeps no packs also limits it to two blocks of kMaxThreads.
inline constexpr int kKeepingForwardThreads = 768;
inline constexpr int kReadingForwardThreads = 3 * kMaxThreads;
inline constexpr int kKeepingBackwardThreads = kMaxThreads;
inline constexpr int kReadingBackwardThreads = 2 * kMaxThreads;

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

// How a kernel processes a row.
struct RowShape {
  int kept_packs;  // of a thread, in registers; 0: the row is read again
  int num_threads;
};

template <typename Job>
int64_t packs_of_row(const Job& job) {
  const int64_t width = is_packable(job) ? kVectorBytes / bytes_of(job.type) : 1;
  return (job.row_size + width - 1) / width;
}

// Returns the shape of rows whose threads keep `kept_packs` packs.
inline RowShape keeping_shape(int64_t num_packs, int kept_packs) {
  const int64_t num_threads = (num_packs + kept_packs - 1) / kept_packs;
  return {kept_packs, static_cast<int>((num_threads + kWarpSize - 1) / kWarpSize * kWarpSize)};
}

inline RowShape reading_shape(int64_t num_packs) {
  int num_threads = kWarpSize;
  while (num_threads < kMaxThreads && num_threads < num_packs) num_threads *= 2;
  return {0, num_threads};
}

template <typename Job>
RowShape row_shape(const Job& job, int kept_packs) {
  const int64_t num_packs = packs_of_row(job);
  return is_packable(job) && num_packs <= int64_t{kept_packs} * kMaxThreads
             ? keeping_shape(num_packs, kept_packs)
             : reading_shape(num_packs);
}

inline RowShape row_shape(const detail::NormForwardJob& job) {
  return row_shape(job, kForwardPacks);
}

inline RowShape row_shape(const detail::NormBackwardJob& job) {
  return row_shape(job, kBackwardPacks);
}

// Returns the number of blocks of the forward: as many as can be resident, at most 32 per
// multiprocessor.
inline int64_t num_forward_blocks(const detail::NormForwardJob& job, c10::Device device) {
  const auto shape = row_shape(job);
  const int resident = shape.kept_packs > 0 ? kKeepingForwardThreads : kReadingForwardThreads;
  const int64_t per_multiprocessor = std::min(32, resident / shape.num_threads);
  return std::min<int64_t>(job.num_rows, num_multiprocessors(device) * per_multiprocessor);
}

// Returns the number of blocks of the backward: as many as can be resident, at most 8 per
// multiprocessor, because all blocks' sums are added at the end.
inline int64_t num_backward_blocks(const detail::NormBackwardJob& job, c10::Device device) {
  const auto shape = row_shape(job);
  const int resident = shape.kept_packs > 0 ? kKeepingBackwardThreads : kReadingBackwardThreads;
  const int64_t per_multiprocessor = std::min(8, resident / shape.num_threads);
  return std::min<int64_t>(job.num_rows, num_multiprocessors(device) * per_multiprocessor);
}

// Calls visit.run<Storage, Params, kWidth, kPacks>() with the job's types, pack width and kept
// packs, kKept or 0.
template <int kKept, typename Job, typename Visit>
void visit_shapes(const Job& job, const Visit& visit) {
  const bool packable = is_packable(job);
  const bool is_kept = row_shape(job).kept_packs > 0;
  visit_storage(job.type, [&]<typename Storage>() {
    constexpr int kWidth = kVectorBytes / sizeof(Storage);
    const auto run = [&]<typename Params>() {
      if (is_kept) return visit.template run<Storage, Params, kWidth, kKept>();
      packable ? visit.template run<Storage, Params, kWidth, 0>()
               : visit.template run<Storage, Params, 1, 0>();
    };
    if (job.params_in_compute_type || std::is_same_v<Storage, ScalarOf<Storage>>) {
      run.template operator()<ScalarOf<Storage>>();
    } else {
      run.template operator()<Storage>();
    }
  });
}

}  // namespace weft::kernels::cuda
