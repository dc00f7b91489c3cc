#include "block_reduce.cuh"
#include "dynamic_shared.cuh"
#include "norm_launch.h"
#include "norm_rows.cuh"
#include "vector_access.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>

namespace weft::kernels::cuda {
namespace {

using detail::NormBackwardJob;
using detail::NormForwardJob;
using detail::StorageType;

// Each block processes one row at a time. A row is read up to three times, after the first time
// from the caches: each thread reads the same packs again.
template <typename Storage, typename Params, int kWidth>
__global__ void __launch_bounds__(kMaxThreads, kForwardBlocks)
    norm_forward_kernel(const NormForwardJob job) {
  using Scalar = ScalarOf<Storage>;
  __shared__ Scalar shared[kWarpSize];
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  const Scalar size = static_cast<Scalar>(job.row_size);
  for (int64_t row = blockIdx.x; row < job.num_rows; row += gridDim.x) {
    const int64_t row_begin = row * job.row_size;
    const void* source = job.residual == nullptr ? job.x : job.sum;
    Scalar total = 0;
    Scalar squares = 0;
    for (int64_t column = threadIdx.x * int64_t{kWidth}; column < job.row_size; column += step) {
      Scalar v[kWidth];
      load_pack<Storage>(job.x, row_begin + column, v);
      if (job.residual != nullptr) {
        Scalar residual[kWidth];
        load_pack<Storage>(job.residual, row_begin + column, residual);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          // Rounded as it is stored and as the backward will read it.
          v[i] = static_cast<Scalar>(static_cast<Storage>(v[i] + residual[i]));
        }
        store_pack<Storage>(job.sum, row_begin + column, v);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        total += v[i];
        squares += v[i] * v[i];
      }
    }
    Scalar mean = 0;
    if (job.centered) {
      mean = block_sum(total, shared) / size;
      // Squares about the mean: mean(v^2) - mean^2 would cancel.
      squares = 0;
      for (int64_t column = threadIdx.x * int64_t{kWidth}; column < job.row_size; column += step) {
        Scalar v[kWidth];
        load_pack<Storage>(source, row_begin + column, v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) squares += (v[i] - mean) * (v[i] - mean);
      }
    }
    const Scalar rstd =
        Scalar(1) / ::sqrt(block_sum(squares, shared) / size + static_cast<Scalar>(job.eps));
    if (threadIdx.x == 0) {
      static_cast<Scalar*>(job.rstd)[row] = rstd;
      if (job.centered) static_cast<Scalar*>(job.mean)[row] = mean;
    }
    for (int64_t column = threadIdx.x * int64_t{kWidth}; column < job.row_size; column += step) {
      Scalar v[kWidth];
      Scalar weight[kWidth];
      Scalar bias[kWidth];
      load_pack<Storage>(source, row_begin + column, v);
      load_params<Params>(job.weight, column, Scalar(1), weight);
      load_params<Params>(job.bias, column, Scalar(0), bias);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = (v[i] - mean) * rstd * weight[i] + bias[i];
      store_pack<Storage>(job.y, row_begin + column, v);
    }
  }
}

// sums[i * stride] += values[i]
template <typename Scalar, int kWidth>
__device__ __forceinline__ void add_strided(Scalar* sums,
                                            int64_t stride,
                                            const Scalar (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i * stride] += values[i];
}

// Each block processes one row at a time, as above. It accumulates its rows' parameter gradients in
// shared memory and stores them to its segment of `partial_sums` at the end; if they do not fit
// into shared memory (`sums_are_shared` is false), it accumulates them in that segment. In shared
// memory, the elements of a pack are num_packs apart, so that neighbouring threads access
// neighbouring banks. A column is accumulated by one thread only, so there are no races.
template <typename Storage, typename Params, int kWidth>
__global__ void __launch_bounds__(kMaxThreads, kBackwardBlocks) norm_backward_kernel(
    const NormBackwardJob job, int num_params, bool sums_are_shared, void* partial_sums) {
  using Scalar = ScalarOf<Storage>;
  __shared__ Scalar shared[kWarpSize];
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  const int64_t num_packs = job.row_size / kWidth;
  const Scalar size = static_cast<Scalar>(job.row_size);
  Scalar* segment = static_cast<Scalar*>(partial_sums) + blockIdx.x * num_params * job.row_size;
  auto* shared_sums = static_cast<Scalar*>(dynamic_shared_memory());
  for (int64_t i = threadIdx.x; i < num_params * job.row_size; i += blockDim.x) {
    if (sums_are_shared) {
      shared_sums[i] = 0;
    } else {
      segment[i] = 0;
    }
  }
  __syncthreads();
  for (int64_t row = blockIdx.x; row < job.num_rows; row += gridDim.x) {
    const int64_t row_begin = row * job.row_size;
    const Scalar rstd = static_cast<const Scalar*>(job.rstd)[row];
    const Scalar mean = job.centered ? static_cast<const Scalar*>(job.mean)[row] : Scalar(0);
    Scalar sum_g = 0;
    Scalar sum_gn = 0;
    for (int64_t pack = threadIdx.x; pack < num_packs; pack += blockDim.x) {
      const int64_t column = pack * kWidth;
      Scalar grad_y[kWidth];
      Scalar v[kWidth];
      Scalar weight[kWidth];
      load_pack<Storage>(job.grad_y, row_begin + column, grad_y);
      load_pack<Storage>(job.v, row_begin + column, v);
      load_params<Params>(job.weight, column, Scalar(1), weight);
      Scalar grad_weight[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Scalar n = (v[i] - mean) * rstd;
        sum_g += grad_y[i] * weight[i];
        sum_gn += grad_y[i] * weight[i] * n;
        grad_weight[i] = grad_y[i] * n;
      }
      // Two branches, so that the compiler knows the kind of memory.
      if (sums_are_shared) {
        if (num_params > 0) add_strided(shared_sums + pack, num_packs, grad_weight);
        if (num_params > 1) add_strided(shared_sums + job.row_size + pack, num_packs, grad_y);
      } else {
        if (num_params > 0) add_strided(segment + column, 1, grad_weight);
        if (num_params > 1) add_strided(segment + job.row_size + column, 1, grad_y);
      }
    }
    if (job.grad_v == nullptr) continue;
    const Scalar mean_g = job.centered ? block_sum(sum_g, shared) / size : Scalar(0);
    const Scalar mean_gn = block_sum(sum_gn, shared) / size;
    for (int64_t column = threadIdx.x * int64_t{kWidth}; column < job.row_size; column += step) {
      Scalar grad_y[kWidth];
      Scalar v[kWidth];
      Scalar weight[kWidth];
      Scalar grad_sum[kWidth];
      load_pack<Storage>(job.grad_y, row_begin + column, grad_y);
      load_pack<Storage>(job.v, row_begin + column, v);
      load_params<Params>(job.weight, column, Scalar(1), weight);
      if (job.grad_sum != nullptr) {
        load_pack<Storage>(job.grad_sum, row_begin + column, grad_sum);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Scalar n = (v[i] - mean) * rstd;
        v[i] = rstd * (grad_y[i] * weight[i] - mean_g - n * mean_gn);
        if (job.grad_sum != nullptr) v[i] += grad_sum[i];
      }
      store_pack<Storage>(job.grad_v, row_begin + column, v);
    }
  }
  if (sums_are_shared) {
    __syncthreads();
    for (int param = 0; param < num_params; ++param) {
      const int64_t begin = param * job.row_size;
      for (int64_t column = threadIdx.x; column < job.row_size; column += blockDim.x) {
        segment[begin + column] =
            shared_sums[begin + (column / kWidth) + (column % kWidth) * num_packs];
      }
    }
  }
}

// sums[column] = the sum over blocks of partial_sums[block][column], in a fixed order. A thread
// block is kWarpSize columns wide and kWarpSize / 4 partial sums high.
template <typename Scalar>
__global__ void sum_blocks_kernel(const Scalar* partial_sums,
                                  Scalar* sums,
                                  int64_t num_blocks,
                                  int64_t num_columns) {
  __shared__ Scalar shared[kWarpSize / 4][kWarpSize];
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

// The bytes of one block's sums.
int64_t bytes_of_sums(const NormBackwardJob& job, int num_params) {
  const int64_t scalar_bytes = job.type == StorageType::kFloat64 ? 8 : 4;
  return num_params * job.row_size * scalar_bytes;
}

template <typename Storage, typename Params, int kWidth>
void run_forward(const NormForwardJob& job, c10::Device device, cudaStream_t stream) {
  launch_kernel(norm_forward_kernel<Storage, Params, kWidth>,
                {static_cast<unsigned>(num_forward_blocks(job, device)),
                 static_cast<unsigned>(threads_of(job))},
                stream,
                job);
}

template <typename Storage, typename Params, int kWidth>
void run_backward(const NormBackwardJob& job,
                  int num_params,
                  void* partial_sums,
                  void* sums,
                  c10::Device device,
                  cudaStream_t stream) {
  using Scalar = ScalarOf<Storage>;
  const auto kernel = norm_backward_kernel<Storage, Params, kWidth>;
  const int64_t num_blocks = num_backward_blocks(job, device);
  // At most half of a multiprocessor's shared memory, so that two blocks fit, less 2 KiB for the
  // kernel's static shared memory and for what the system reserves in each block.
  const int64_t max_shared_bytes =
      std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / 2) -
      2048;
  const int64_t sums_bytes = bytes_of_sums(job, num_params);
  const bool sums_are_shared = num_params > 0 && sums_bytes <= max_shared_bytes;
  const auto shared_bytes = static_cast<size_t>(sums_are_shared ? sums_bytes : 0);
  C10_CUDA_CHECK(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(max_shared_bytes)));
  launch_kernel(
      kernel,
      {static_cast<unsigned>(num_blocks), static_cast<unsigned>(threads_of(job)), shared_bytes},
      stream,
      job,
      num_params,
      sums_are_shared,
      partial_sums);
  if (num_params == 0) return;
  const int64_t num_columns = num_params * job.row_size;
  launch_kernel(sum_blocks_kernel<Scalar>,
                {static_cast<unsigned>((num_columns + kWarpSize - 1) / kWarpSize),
                 dim3(kWarpSize, kWarpSize / 4)},
                stream,
                static_cast<const Scalar*>(partial_sums),
                static_cast<Scalar*>(sums),
                num_blocks,
                num_columns);
}

struct Forward {
  template <typename Storage, typename Params, int kWidth>
  void run() const {
    run_forward<Storage, Params, kWidth>(job, device, stream);
  }

  const NormForwardJob& job;
  c10::Device device;
  cudaStream_t stream;
};

struct Backward {
  template <typename Storage, typename Params, int kWidth>
  void run() const {
    run_backward<Storage, Params, kWidth>(job, num_params, partial_sums, sums, device, stream);
  }

  const NormBackwardJob& job;
  int num_params;
  void* partial_sums;
  void* sums;
  c10::Device device;
  cudaStream_t stream;
};

}  // namespace

void launch_norm_forward(const NormForwardJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  visit_types(job, Forward{job, device, c10::cuda::getCurrentCUDAStream(device.index())});
}

int64_t norm_backward_blocks(const NormBackwardJob& job, c10::Device device) {
  return num_backward_blocks(job, device);
}

void launch_norm_backward(const NormBackwardJob& job,
                          int num_params,
                          void* partial_sums,
                          void* sums,
                          c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  visit_types(job,
              Backward{job,
                       num_params,
                       partial_sums,
                       sums,
                       device,
                       c10::cuda::getCurrentCUDAStream(device.index())});
}

}  // namespace weft::kernels::cuda
