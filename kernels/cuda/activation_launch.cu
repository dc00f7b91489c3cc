#include "activation_launch.h"
#include "activation_math.h"
#include "vector_access.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace weft::kernels::cuda {
namespace {

using detail::ActivationJob;
using detail::StorageType;

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

__device__ __forceinline__ float normal_cdf(float x) { return normcdff(x); }
__device__ __forceinline__ double normal_cdf(double x) { return normcdf(x); }

// The `Math` of activation_math.h.
template <typename ScalarType>
struct DeviceMath {
  using Scalar = ScalarType;

  static __device__ __forceinline__ Scalar exp(Scalar x) { return ::exp(x); }

  static __device__ __forceinline__ detail::NormalPoint<Scalar> normal(Scalar x) {
    constexpr Scalar kInverseSqrtTwoPi = Scalar(0.39894228040143267793994605993438);
    return {normal_cdf(x), ::exp(Scalar(-0.5) * x * x) * kInverseSqrtTwoPi};
  }
};

// The remainder of a division, in 32 bits where the numbers allow: 64-bit division is slow here.
__device__ __forceinline__ int64_t column_of(int64_t element_idx, int64_t row_size) {
  if (((element_idx | row_size) >> 31) == 0) {
    return static_cast<uint32_t>(element_idx) % static_cast<uint32_t>(row_size);
  }
  return element_idx % row_size;
}

// kWidth elements from `begin` on, as scalars, with the bias of their columns.
template <typename Storage, typename Scalar, int kWidth>
__device__ __forceinline__ void read(
    const void* data, const void* bias, int64_t row_size, int64_t begin, Scalar (&out)[kWidth]) {
  load_pack<Storage>(data, begin, out);
  if (bias == nullptr) return;
  int64_t column = column_of(begin, row_size);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    out[i] += static_cast<Scalar>(static_cast<const Storage*>(bias)[column]);
    column = column + 1 == row_size ? 0 : column + 1;
  }
}

template <typename Storage, Activation kActivation, int kWidth>
__device__ __forceinline__ void compute(const ActivationJob& job, int64_t begin) {
  using Scalar = ScalarOf<Storage>;
  using Formula = detail::Formula<DeviceMath<Scalar>, kActivation>;
  const bool gated = job.up != nullptr;
  Scalar x[kWidth];
  Scalar up[kWidth];
  Scalar h[kWidth];
  read<Storage>(job.x, job.x_bias, job.row_size, begin, x);
  if (gated) read<Storage>(job.up, job.up_bias, job.row_size, begin, up);

  if (job.grad_h == nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      h[i] = gated ? Formula::value(x[i]) * up[i] : Formula::value(x[i]);
    }
    store_pack<Storage>(job.h, begin, h);
    return;
  }

  Scalar grad_h[kWidth];
  Scalar grad_x[kWidth];
  read<Storage>(job.grad_h, nullptr, job.row_size, begin, grad_h);
  if (gated) {
    Scalar grad_up[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto result =
          detail::gated_gradient<DeviceMath<Scalar>, kActivation>(grad_h[i], x[i], up[i]);
      grad_x[i] = result.grad_gate;
      grad_up[i] = result.grad_up;
      h[i] = result.h;
    }
    store_pack<Storage>(job.grad_up, begin, grad_up);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto result = Formula::backward(grad_h[i], x[i]);
      grad_x[i] = result.grad_x;
      h[i] = result.h;
    }
  }
  store_pack<Storage>(job.grad_x, begin, grad_x);
  store_pack<Storage>(job.h, begin, h);
}

// One kernel for the four operations: they differ by branches that every thread takes alike, and
// the time goes to memory. kWidth elements at a time, the remainder one by one.
template <typename Storage, Activation kActivation, int kWidth>
__global__ void __launch_bounds__(kThreads) activation_kernel(const ActivationJob job) {
  const int64_t thread_idx = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t num_packs = job.num_elements / kWidth;
  for (int64_t pack_idx = thread_idx; pack_idx < num_packs; pack_idx += num_threads) {
    compute<Storage, kActivation, kWidth>(job, pack_idx * kWidth);
  }
  if constexpr (kWidth > 1) {
    const int64_t rest_idx = num_packs * kWidth + thread_idx;
    if (rest_idx < job.num_elements) compute<Storage, kActivation, 1>(job, rest_idx);
  }
}

bool is_vector_aligned(const ActivationJob& job) {
  uintptr_t bits = 0;
  for (const void* pointer : {job.grad_h,
                              job.x,
                              job.up,
                              static_cast<const void*>(job.h),
                              static_cast<const void*>(job.grad_x),
                              static_cast<const void*>(job.grad_up)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  return bits % kVectorBytes == 0;
}

template <typename Storage, Activation kActivation, int kWidth>
void launch(const ActivationJob& job, int num_multiprocessors, cudaStream_t stream) {
  const int64_t num_packs = (job.num_elements + kWidth - 1) / kWidth;
  const int64_t num_blocks =
      std::min<int64_t>((num_packs + kThreads - 1) / kThreads,
                        static_cast<int64_t>(num_multiprocessors) * kBlocksPerMultiprocessor);
  activation_kernel<Storage, kActivation, kWidth>
      <<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(job);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Storage, Activation kActivation>
void launch_width(const ActivationJob& job, int num_multiprocessors, cudaStream_t stream) {
  is_vector_aligned(job) ? launch<Storage, kActivation, kVectorBytes / sizeof(Storage)>(
                               job, num_multiprocessors, stream)
                         : launch<Storage, kActivation, 1>(job, num_multiprocessors, stream);
}

template <typename Storage>
void launch_storage(const ActivationJob& job, int num_multiprocessors, cudaStream_t stream) {
  switch (job.activation) {
    case Activation::kSilu:
      return launch_width<Storage, Activation::kSilu>(job, num_multiprocessors, stream);
    case Activation::kGelu:
      return launch_width<Storage, Activation::kGelu>(job, num_multiprocessors, stream);
    case Activation::kGeluTanh:
      return launch_width<Storage, Activation::kGeluTanh>(job, num_multiprocessors, stream);
    case Activation::kRelu:
      return launch_width<Storage, Activation::kRelu>(job, num_multiprocessors, stream);
  }
}

}  // namespace

void launch_activation(const ActivationJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  int num_multiprocessors = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device.index()));
  switch (job.type) {
    case StorageType::kFloat32:
      return launch_storage<float>(job, num_multiprocessors, stream);
    case StorageType::kFloat64:
      return launch_storage<double>(job, num_multiprocessors, stream);
    case StorageType::kBFloat16:
      return launch_storage<c10::BFloat16>(job, num_multiprocessors, stream);
    case StorageType::kFloat16:
      return launch_storage<c10::Half>(job, num_multiprocessors, stream);
  }
}

}  // namespace weft::kernels::cuda
