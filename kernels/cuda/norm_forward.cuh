#pragma once

#include "block_reduce.cuh"
#include "kept_packs.cuh"
#include "norm_job.h"
#include "norm_rows.cuh"
#include "vector_access.cuh"

#include <cstdint>

namespace weft::kernels::cuda {

// Each block normalizes one row at a time. With kPacks > 0 the row stays in registers. With
// kPacks = 0 each thread reads its packs up to three times, after the first time from the caches.
template <typename Storage, typename Params, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxThreads,
                                  kPacks > 0 ? 1 : kReadingForwardThreads / kMaxThreads)
    norm_forward_kernel(const detail::NormForwardJob job) {
  using Scalar = ScalarOf<Storage>;
  __shared__ Scalar shared[kWarpSize];
  const int64_t num_packs = job.row_size / kWidth;
  const Scalar size = static_cast<Scalar>(job.row_size);
  for (int64_t row = blockIdx.x; row < job.num_rows; row += gridDim.x) {
    const int64_t row_begin = row * job.row_size;
    const void* source = job.residual == nullptr ? job.x : job.sum;
    KeptPacks<Storage, kWidth, kPacks> values;
    values.load(job.x, row_begin, num_packs);
    KeptPacks<Storage, kWidth, kPacks> residuals;
    if (job.residual != nullptr) residuals.load(job.residual, row_begin, num_packs);
    Scalar total = 0;
    Scalar squares = 0;
    for_each_pack<kPacks>(num_packs, [&](int i, int64_t pack) {
      const int64_t begin = row_begin + pack * kWidth;
      Scalar v[kWidth];
      values.get(i, job.x, begin, v);
      if (job.residual != nullptr) {
        Scalar residual[kWidth];
        residuals.get(i, job.residual, begin, residual);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          // Rounded like the stored sum, which the backward will read.
          v[j] = static_cast<Scalar>(static_cast<Storage>(v[j] + residual[j]));
        }
        store_pack<Storage>(job.sum, begin, v);
        values.set(i, v);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        total += v[j];
        squares += v[j] * v[j];
      }
    });
    Scalar mean = 0;
    if (job.centered) {
      mean = block_sum(total, shared) / size;
      // Squares about the mean: mean(v^2) - mean^2 would cancel.
      squares = 0;
      for_each_pack<kPacks>(num_packs, [&](int i, int64_t pack) {
        Scalar v[kWidth];
        values.get(i, source, row_begin + pack * kWidth, v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) squares += (v[j] - mean) * (v[j] - mean);
      });
    }
    const Scalar rstd =
        Scalar(1) / ::sqrt(block_sum(squares, shared) / size + static_cast<Scalar>(job.eps));
    if (threadIdx.x == 0) {
      static_cast<Scalar*>(job.rstd)[row] = rstd;
      if (job.centered) static_cast<Scalar*>(job.mean)[row] = mean;
    }
    for_each_pack<kPacks>(num_packs, [&](int i, int64_t pack) {
      const int64_t column = pack * kWidth;
      Scalar v[kWidth];
      Scalar weight[kWidth];
      Scalar bias[kWidth];
      values.get(i, source, row_begin + column, v);
      load_params<Params>(job.weight, column, Scalar(1), weight);
      load_params<Params>(job.bias, column, Scalar(0), bias);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = (v[j] - mean) * rstd * weight[j] + bias[j];
      store_pack<Storage>(job.y, row_begin + column, v);
    });
  }
}

}  // namespace weft::kernels::cuda
