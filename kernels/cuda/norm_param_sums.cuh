#pragma once

#include "dynamic_shared.cuh"
#include "kept_packs.cuh"
#include "vector_access.cuh"

#include <cstdint>

// Sums a block's gradients of weight and bias over its rows. store() writes the sums to the block's
// segment of `partial_sums`: scalars [num_params, row_size]. One thread sums each column, so there
// are no races.
namespace weft::kernels::cuda {

// Sums in registers: the thread's packs are the same in every row.
template <typename Scalar, int kWidth, int kPacks>
class ParamSums {
 public:
  __device__ __forceinline__ ParamSums(Scalar* segment,
                                       int64_t row_size,
                                       int num_params,
                                       bool /*sums_are_shared*/,
                                       int64_t num_packs)
      : segment_(segment), row_size_(row_size), num_packs_(num_packs), num_params_(num_params) {}

  // Adds to the columns of the thread's pack i, which is the row's pack `pack`.
  __device__ __forceinline__ void add(int i,
                                      int64_t /*pack*/,
                                      const Scalar (&grad_weight)[kWidth],
                                      const Scalar (&grad_bias)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      weight_[i][j] += grad_weight[j];
      bias_[i][j] += grad_bias[j];
    }
  }

  __device__ __forceinline__ void store() {
    for_each_pack<kPacks>(num_packs_, [&](int i, int64_t pack) {
      if (num_params_ > 0) store_pack<Scalar>(segment_, pack * kWidth, weight_[i]);
      if (num_params_ > 1) store_pack<Scalar>(segment_, row_size_ + pack * kWidth, bias_[i]);
    });
  }

 private:
  Scalar* segment_;
  int64_t row_size_;
  int64_t num_packs_;
  int num_params_;
  Scalar weight_[kPacks][kWidth] = {};
  Scalar bias_[kPacks][kWidth] = {};
};

// sums[j * stride] += values[j]
template <typename Scalar, int kWidth>
__device__ __forceinline__ void add_strided(Scalar* sums,
                                            int64_t stride,
                                            const Scalar (&values)[kWidth]) {
  // All loads come first: the compiler cannot move them before the stores, because it must assume
  // that the addresses overlap.
  Scalar old[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) old[j] = sums[j * stride];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums[j * stride] = old[j] + values[j];
}

// Sums in shared memory or, if they do not fit there, in the segment. In shared memory, the
// elements of a pack are num_packs apart, so that neighbouring threads access neighbouring banks.
template <typename Scalar, int kWidth>
class ParamSums<Scalar, kWidth, 0> {
 public:
  // The sums are 0 for all threads after the next barrier.
  __device__ __forceinline__ ParamSums(
      Scalar* segment, int64_t row_size, int num_params, bool sums_are_shared, int64_t num_packs)
      : segment_(segment),
        shared_(static_cast<Scalar*>(dynamic_shared_memory())),
        row_size_(row_size),
        num_packs_(num_packs),
        num_params_(num_params),
        sums_are_shared_(sums_are_shared) {
    for (int64_t i = threadIdx.x; i < num_params * row_size; i += blockDim.x) {
      if (sums_are_shared) {
        shared_[i] = 0;
      } else {
        segment_[i] = 0;
      }
    }
  }

  __device__ __forceinline__ void add(int /*i*/,
                                      int64_t pack,
                                      const Scalar (&grad_weight)[kWidth],
                                      const Scalar (&grad_bias)[kWidth]) {
    // Two branches, so that the compiler knows the kind of memory.
    if (sums_are_shared_) {
      if (num_params_ > 0) add_strided(shared_ + pack, num_packs_, grad_weight);
      if (num_params_ > 1) add_strided(shared_ + row_size_ + pack, num_packs_, grad_bias);
    } else {
      if (num_params_ > 0) add_strided(segment_ + pack * kWidth, 1, grad_weight);
      if (num_params_ > 1) add_strided(segment_ + row_size_ + pack * kWidth, 1, grad_bias);
    }
  }

  __device__ __forceinline__ void store() {
    if (!sums_are_shared_) return;
    __syncthreads();
    for (int param = 0; param < num_params_; ++param) {
      const int64_t begin = param * row_size_;
      for (int64_t column = threadIdx.x; column < row_size_; column += blockDim.x) {
        segment_[begin + column] =
            shared_[begin + (column / kWidth) + (column % kWidth) * num_packs_];
      }
    }
  }

 private:
  Scalar* segment_;
  Scalar* shared_;
  int64_t row_size_;
  int64_t num_packs_;
  int num_params_;
  bool sums_are_shared_;
};

}  // namespace weft::kernels::cuda
