#pragma once

#include "block_reduce.cuh"
#include "kept_packs.cuh"
#include "norm_job.h"
#include "norm_param_sums.cuh"
#include "norm_rows.cuh"
#include "vector_access.cuh"

#include <cstdint>

namespace weft::kernels::cuda {

// The packs and the statistics of one row that a thread reads.
template <typename Storage, int kWidth, int kPacks>
struct BackwardRow {
  using Scalar = ScalarOf<Storage>;

  __device__ __forceinline__ void load(const detail::NormBackwardJob& job,
                                       int64_t row,
                                       int64_t num_packs) {
    const int64_t begin = row * job.row_size;
    grads.load(job.grad_y, begin, num_packs);
    values.load(job.v, begin, num_packs);
    rstd = static_cast<const Scalar*>(job.rstd)[row];
    mean = job.centered ? static_cast<const Scalar*>(job.mean)[row] : Scalar(0);
  }

  KeptPacks<Storage, kWidth, kPacks> grads;
  KeptPacks<Storage, kWidth, kPacks> values;
  Scalar rstd;
  Scalar mean;
};

// Each block processes one row at a time. With kPacks > 0 the row stays in registers, and the block
// loads grad_y and v of its next row while it processes the current one. With kPacks = 0 each
// thread reads its packs of grad_y and v twice. A block sums its rows' parameter gradients and
// stores the sums to its segment of `partial_sums` at the end.
template <typename Storage, typename Params, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxThreads,
                                  kPacks > 0 ? 1 : kReadingBackwardThreads / kMaxThreads)
    norm_backward_kernel(const detail::NormBackwardJob job,
                         int num_params,
                         bool sums_are_shared,
                         void* partial_sums) {
  using Scalar = ScalarOf<Storage>;
  __shared__ Pair<Scalar> shared[kWarpSize];
  const int64_t num_packs = job.row_size / kWidth;
  const Scalar size = static_cast<Scalar>(job.row_size);
  Scalar* segment = static_cast<Scalar*>(partial_sums) + blockIdx.x * num_params * job.row_size;
  ParamSums<Scalar, kWidth, kPacks> param_sums(
      segment, job.row_size, num_params, sums_are_shared, num_packs);
  BackwardRow<Storage, kWidth, kPacks> current;
  BackwardRow<Storage, kWidth, kPacks> next;
  if (blockIdx.x < job.num_rows) next.load(job, blockIdx.x, num_packs);
  __syncthreads();
  for (int64_t row = blockIdx.x; row < job.num_rows; row += gridDim.x) {
    current = next;
    if (row + gridDim.x < job.num_rows) next.load(job, row + gridDim.x, num_packs);
    const int64_t row_begin = row * job.row_size;
    const Scalar rstd = current.rstd;
    const Scalar mean = current.mean;
    KeptPacks<Storage, kWidth, kPacks> grad_sums;
    if (job.grad_sum != nullptr) grad_sums.load(job.grad_sum, row_begin, num_packs);
    Pair<Scalar> sums{0, 0};  // of g and of g * n, where g = grad_y * weight
    for_each_pack<kPacks>(num_packs, [&](int i, int64_t pack) {
      const int64_t column = pack * kWidth;
      Scalar grad_y[kWidth];
      Scalar v[kWidth];
      Scalar weight[kWidth];
      current.grads.get(i, job.grad_y, row_begin + column, grad_y);
      current.values.get(i, job.v, row_begin + column, v);
      load_params<Params>(job.weight, column, Scalar(1), weight);
      Scalar grad_weight[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Scalar n = (v[j] - mean) * rstd;
        sums.first += grad_y[j] * weight[j];
        sums.second += grad_y[j] * weight[j] * n;
        grad_weight[j] = grad_y[j] * n;
      }
      param_sums.add(i, pack, grad_weight, grad_y);
    });
    if (job.grad_v == nullptr) continue;
    const Pair<Scalar> totals = block_sum(sums, shared);
    const Scalar mean_g = job.centered ? totals.first / size : Scalar(0);
    const Scalar mean_gn = totals.second / size;
    for_each_pack<kPacks>(num_packs, [&](int i, int64_t pack) {
      const int64_t column = pack * kWidth;
      Scalar grad_y[kWidth];
      Scalar v[kWidth];
      Scalar weight[kWidth];
      Scalar grad_sum[kWidth];
      current.grads.get(i, job.grad_y, row_begin + column, grad_y);
      current.values.get(i, job.v, row_begin + column, v);
      load_params<Params>(job.weight, column, Scalar(1), weight);
      if (job.grad_sum != nullptr) grad_sums.get(i, job.grad_sum, row_begin + column, grad_sum);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Scalar n = (v[j] - mean) * rstd;
        v[j] = rstd * (grad_y[j] * weight[j] - mean_g - n * mean_gn);
        if (job.grad_sum != nullptr) v[j] += grad_sum[j];
      }
      store_pack<Storage>(job.grad_v, row_begin + column, v);
    });
  }
  param_sums.store();
}

// sums[column] = the sum over blocks of partial_sums[block][column], in a fixed order. A thread
// block is kWarpSize columns wide and kWarpSize partial sums high.
template <typename Scalar>
__global__ void __launch_bounds__(kWarpSize* kWarpSize) sum_blocks_kernel(
    const Scalar* partial_sums, Scalar* sums, int64_t num_blocks, int64_t num_columns) {
  __shared__ Scalar shared[kWarpSize][kWarpSize];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpSize + threadIdx.x;
  Scalar total = 0;
  if (column < num_columns) {
    for (int64_t block = threadIdx.y; block < num_blocks; block += blockDim.y) {
      total += partial_sums[block * num_columns + column];
    }
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && column < num_columns) {
    for (int other = 1; other < static_cast<int>(blockDim.y); ++other) {
      total += shared[other][threadIdx.x];
    }
    sums[column] = total;
  }
}

}  // namespace weft::kernels::cuda
