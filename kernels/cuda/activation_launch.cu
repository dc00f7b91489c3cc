#include "activation_launch.h"
#include "activation_math.h"
#include "elementwise.cuh"
#include "vector_access.cuh"

#include <c10/cuda/CUDAGuard.h>

#include <cstdint>

namespace weft::kernels::cuda {
namespace {

using detail::ActivationJob;

__device__ __forceinline__ float normal_cdf(float x) { return normcdff(x); }
__device__ __forceinline__ double normal_cdf(double x) { return normcdf(x); }

// Implements the `Math` of activation_math.h.
template <typename ScalarType>
struct DeviceMath {
  using Scalar = ScalarType;

  static __device__ __forceinline__ Scalar exp(Scalar x) { return ::exp(x); }

  static __device__ __forceinline__ detail::NormalPoint<Scalar> normal(Scalar x) {
    constexpr Scalar kInverseSqrtTwoPi = Scalar(0.39894228040143267793994605993438);
    return {normal_cdf(x), ::exp(Scalar(-0.5) * x * x) * kInverseSqrtTwoPi};
  }
};

template <typename Storage, Activation kActivation, int kWidth>
__device__ __forceinline__ void compute(const ActivationJob& job, int64_t begin) {
  using Scalar = ScalarOf<Storage>;
  using Formula = detail::Formula<DeviceMath<Scalar>, kActivation>;
  const bool gated = job.up != nullptr;
  Scalar x[kWidth];
  Scalar up[kWidth];
  Scalar h[kWidth];
  load_pack<Storage>(job.x, begin, x);
  if (gated) load_pack<Storage>(job.up, begin, up);

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
  load_pack<Storage>(job.grad_h, begin, grad_h);
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

// The `Operation` of elementwise.cuh. One kernel serves forward and backward, plain and
// gated: they differ in branches that are the same for every thread, and memory bandwidth limits
// the speed.
template <typename Element, Activation kActivation>
struct ActivationOperation {
  using Storage = Element;

  template <int kWidth>
  static __device__ __forceinline__ void run(const ActivationJob& job, int64_t begin) {
    compute<Storage, kActivation, kWidth>(job, begin);
  }
};

template <Activation kActivation>
void launch(const ActivationJob& job, c10::Device device) {
  const bool is_packable =
      is_vector_aligned({job.grad_h, job.x, job.up, job.h, job.grad_x, job.grad_up});
  visit_storage(job.type, [&]<typename Storage>() {
    launch_elementwise<ActivationOperation<Storage, kActivation>>(job, is_packable, device);
  });
}

}  // namespace

void launch_activation(const ActivationJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  switch (job.activation) {
    case Activation::kSilu:
      return launch<Activation::kSilu>(job, device);
    case Activation::kGelu:
      return launch<Activation::kGelu>(job, device);
    case Activation::kGeluTanh:
      return launch<Activation::kGeluTanh>(job, device);
    case Activation::kRelu:
      return launch<Activation::kRelu>(job, device);
  }
}

}  // namespace weft::kernels::cuda
