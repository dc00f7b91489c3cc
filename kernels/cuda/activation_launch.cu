#include "activation_launch.h"
#include "activation_math.h"
#include "elementwise.cuh"
#include "vector_access.cuh"

#include <c10/cuda/CUDAGuard.h>

#include <cstdint>

namespace weft::kernels::cuda {
namespace {

using detail::ActivationJob;

__device__ __forceinline__ detail::NormalPoint<double> normal_point(double x) {
  constexpr double kInverseSqrtTwoPi = 0.39894228040143267793994605993438;
  return {normcdf(x), ::exp(-0.5 * x * x) * kInverseSqrtTwoPi};
}

// With a = |x| and c = 4, the upper tail of the distribution is exp(-a^2 / 2) times a smooth
// function of t = (a - c) / (a + c), divided by a + c. The polynomial is a fit of that function
// with a relative error of 2.3e-8, so both tails keep their relative accuracy. CUDA's normcdff()
// takes about twice as many instructions, which would make the arithmetic slower than the memory.
__device__ __forceinline__ detail::NormalPoint<float> normal_point(float x) {
  constexpr float kInverseSqrtTwoPi = 0.39894228040143267793994605993438F;
  constexpr float kCenter = 4.0F;
  constexpr float kFit[] = {0.75528512121297372228F,
                            -0.60789647327261314123F,
                            0.38713780634484054973F,
                            -0.18652562654249299948F,
                            0.060393795198436674888F,
                            -0.0075167549053766592407F,
                            -0.0034733096847909944404F,
                            0.0015706828906199014037F,
                            0.00012768286857052466624F,
                            -0.0001607627685665886083F};
  constexpr int kTerms = sizeof(kFit) / sizeof(float);
  // -log2(e) / 2 in two parts.
  constexpr float kHalfLog2E = -0.72134752044448170368F;
  constexpr float kHalfLog2ERest = -0.72134752044448170368 - kHalfLog2E;
  const float a = ::fminf(::fabsf(x), 15.0F);  // the density is 0 beyond
  // 2^(high + low) = exp(-a^2 / 2): exp2 would magnify the rounding errors of a^2 and of `high`.
  const float square = a * a;
  const float high = square * kHalfLog2E;
  const float low = ::fmaf(square, kHalfLog2E, -high) +
                    ::fmaf(square, kHalfLog2ERest, ::fmaf(a, a, -square) * kHalfLog2E);
  const float power = ::exp2f(high);
  const float density = ::fmaf(power, low * 0.69314718055994530942F, power);
  const float inverse = __fdividef(1.0F, a + kCenter);
  const float t = (a - kCenter) * inverse;
  float fit = kFit[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) fit = ::fmaf(fit, t, kFit[i]);
  const float tail = density * (fit * inverse);
  return {x > 0 ? 1 - tail : tail, density * kInverseSqrtTwoPi};
}

// The same for results that are rounded to a half type: with c = 3 and a relative error of 2.4e-5,
// this version takes about two thirds of the instructions.
__device__ __forceinline__ detail::NormalPoint<float> rough_normal_point(float x) {
  constexpr float kInverseSqrtTwoPi = 0.39894228040143267793994605993438F;
  constexpr float kCenter = 3.0F;
  constexpr float kFit[] = {0.72909086942672729492F,
                            -0.50942337512969970703F,
                            0.22985516488552093506F,
                            -0.046364758163690567017F,
                            -0.0097725652158260345459F,
                            0.0049891024827957153320F};
  constexpr int kTerms = sizeof(kFit) / sizeof(float);
  constexpr float kHalfLog2E = -0.72134752044448170368F;  // -log2(e) / 2
  const float a = ::fminf(::fabsf(x), 15.0F);
  const float density = ::exp2f(a * a * kHalfLog2E);
  const float inverse = __fdividef(1.0F, a + kCenter);
  const float t = (a - kCenter) * inverse;
  float fit = kFit[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) fit = ::fmaf(fit, t, kFit[i]);
  const float tail = density * (fit * inverse);
  return {x > 0 ? 1 - tail : tail, density * kInverseSqrtTwoPi};
}

// Implements the `Math` of activation_math.h. `Storage` is the type that results are rounded to.
template <typename Storage>
struct DeviceMath {
  using Scalar = ScalarOf<Storage>;

  static __device__ __forceinline__ Scalar exp(Scalar x) { return ::exp(x); }

  static __device__ __forceinline__ detail::NormalPoint<Scalar> normal(Scalar x) {
    if constexpr (sizeof(Storage) < sizeof(float)) {
      return rough_normal_point(x);
    } else {
      return normal_point(x);
    }
  }
};

// Returns the index, in an array of alternating rows, of element `begin` of gate or up. A division
// of 64-bit integers takes several times as many instructions as one of 32-bit integers.
__device__ __forceinline__ int64_t gate_up_idx(const ActivationJob& job, int64_t begin) {
  if (job.row_size == 0) return begin;
  const int64_t row_idx =
      job.num_elements <= UINT32_MAX
          ? int64_t{static_cast<uint32_t>(begin) / static_cast<uint32_t>(job.row_size)}
          : begin / job.row_size;
  return begin + row_idx * job.row_size;
}

template <typename Storage, Activation kActivation, int kWidth>
__device__ __forceinline__ void compute(const ActivationJob& job, int64_t begin) {
  using Scalar = ScalarOf<Storage>;
  using Math = DeviceMath<Storage>;
  using Formula = detail::Formula<Math, kActivation>;
  const bool gated = job.up != nullptr;
  const int64_t gate_begin = gate_up_idx(job, begin);
  Scalar x[kWidth];
  Scalar up[kWidth];
  Scalar h[kWidth];
  load_pack<Storage>(job.x, gate_begin, x);
  if (gated) load_pack<Storage>(job.up, gate_begin, up);

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
      const auto result = detail::gated_gradient<Math, kActivation>(grad_h[i], x[i], up[i]);
      grad_x[i] = result.grad_gate;
      grad_up[i] = result.grad_up;
      h[i] = result.h;
    }
    store_pack<Storage>(job.grad_up, gate_begin, grad_up);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto result = Formula::backward(grad_h[i], x[i]);
      grad_x[i] = result.grad_x;
      h[i] = result.h;
    }
  }
  store_pack<Storage>(job.grad_x, gate_begin, grad_x);
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
  // If all pointers are aligned, a row has a whole number of packs: `up` points one row after `x`.
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
