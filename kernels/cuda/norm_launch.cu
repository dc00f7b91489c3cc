#include "norm_backward.cuh"
#include "norm_forward.cuh"
#include "norm_launch.h"
#include "norm_rows.cuh"

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

// The bytes of one block's sums.
int64_t bytes_of_sums(const NormBackwardJob& job, int num_params) {
  const int64_t scalar_bytes = job.type == StorageType::kFloat64 ? 8 : 4;
  return num_params * job.row_size * scalar_bytes;
}

template <typename Storage, typename Params, int kWidth, int kPacks>
void run_forward(const NormForwardJob& job, c10::Device device, cudaStream_t stream) {
  launch_kernel(norm_forward_kernel<Storage, Params, kWidth, kPacks>,
                {static_cast<unsigned>(num_forward_blocks(job, device)),
                 static_cast<unsigned>(row_shape(job).num_threads)},
                stream,
                job);
}

template <typename Storage, typename Params, int kWidth, int kPacks>
void run_backward(const NormBackwardJob& job,
                  int num_params,
                  void* partial_sums,
                  void* sums,
                  c10::Device device,
                  cudaStream_t stream) {
  using Scalar = ScalarOf<Storage>;
  const auto kernel = norm_backward_kernel<Storage, Params, kWidth, kPacks>;
  const int64_t num_blocks = num_backward_blocks(job, device);
  // At most half of a multiprocessor's shared memory, so that two blocks fit, less 2 KiB for the
  // kernel's static shared memory and for what the system reserves in each block.
  const int64_t max_shared_bytes =
      std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / 2) -
      2048;
  const int64_t sums_bytes = bytes_of_sums(job, num_params);
  const bool sums_are_shared = kPacks == 0 && num_params > 0 && sums_bytes <= max_shared_bytes;
  const auto shared_bytes = static_cast<size_t>(sums_are_shared ? sums_bytes : 0);
  C10_CUDA_CHECK(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(max_shared_bytes)));
  launch_kernel(kernel,
                {static_cast<unsigned>(num_blocks),
                 static_cast<unsigned>(row_shape(job).num_threads),
                 shared_bytes},
                stream,
                job,
                num_params,
                sums_are_shared,
                partial_sums);
  if (num_params == 0) return;
  const int64_t num_columns = num_params * job.row_size;
  launch_kernel(sum_blocks_kernel<Scalar>,
                {static_cast<unsigned>((num_columns + kWarpSize - 1) / kWarpSize),
                 dim3(kWarpSize, kWarpSize)},
                stream,
                static_cast<const Scalar*>(partial_sums),
                static_cast<Scalar*>(sums),
                num_blocks,
                num_columns);
}

struct Forward {
  template <typename Storage, typename Params, int kWidth, int kPacks>
  void run() const {
    run_forward<Storage, Params, kWidth, kPacks>(job, device, stream);
  }

  const NormForwardJob& job;
  c10::Device device;
  cudaStream_t stream;
};

struct Backward {
  template <typename Storage, typename Params, int kWidth, int kPacks>
  void run() const {
    run_backward<Storage, Params, kWidth, kPacks>(
        job, num_params, partial_sums, sums, device, stream);
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
  visit_shapes<kForwardPacks>(
      job, Forward{job, device, c10::cuda::getCurrentCUDAStream(device.index())});
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
  visit_shapes<kBackwardPacks>(job,
                               Backward{job,
                                        num_params,
                                        partial_sums,
                                        sums,
                                        device,
                                        c10::cuda::getCurrentCUDAStream(device.index())});
}

}  // namespace weft::kernels::cuda
