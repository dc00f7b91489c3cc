#pragma once

#include <weft/kernels/activation_kind.h>

#include <c10/macros/Macros.h>

#include <cmath>

// The formulae of the activations, shared by all devices. `Math` supplies the transcendental
// functions:
//
//   struct Math {
//     using Scalar = float or double;
//     static Scalar exp(Scalar x);
//     static NormalPoint<Scalar> normal(Scalar x);
//   };
//
// Values at NaN and infinity are torch's; in particular silu and gelu of -inf are NaN.
namespace weft::kernels::detail {

// The standard normal distribution at one point.
template <typename Scalar>
struct NormalPoint {
  Scalar cdf;
  Scalar pdf;
};

template <typename Scalar>
struct ActivationGradient {
  Scalar grad_x;
  Scalar h;
};

// sigmoid(x) and its derivative, each to full relative accuracy: 1 - sigmoid(x) would cancel for
// large x, and exp(-x) would overflow for large negative x.
template <typename Scalar>
struct Logistic {
  Scalar value;
  Scalar slope;  // the derivative
};

template <typename Math>
C10_HOST_DEVICE C10_ALWAYS_INLINE Logistic<typename Math::Scalar> logistic(
    typename Math::Scalar x) {
  using Scalar = typename Math::Scalar;
  const Scalar decay = Math::exp(-std::fabs(x));
  const Scalar inverse = Scalar(1) / (Scalar(1) + decay);
  const Scalar smaller = decay * inverse;  // the smaller of sigmoid(x) and sigmoid(-x)
  return {x < Scalar(0) ? smaller : inverse, smaller * inverse};
}

// Formula::value(x) = act(x); Formula::backward(grad_h, x) = {grad_h * act'(x), act(x)}.
template <typename Math, Activation kActivation>
struct Formula;

template <typename Math>
struct Formula<Math, Activation::kSilu> {
  using Scalar = typename Math::Scalar;

  C10_HOST_DEVICE C10_ALWAYS_INLINE static Scalar value(Scalar x) {
    return x / (Scalar(1) + Math::exp(-x));
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static ActivationGradient<Scalar> backward(Scalar grad_h,
                                                                               Scalar x) {
    const Logistic<Scalar> sigmoid = logistic<Math>(x);
    return {grad_h * (sigmoid.value + x * sigmoid.slope), x * sigmoid.value};
  }
};

template <typename Math>
struct Formula<Math, Activation::kGelu> {
  using Scalar = typename Math::Scalar;

  C10_HOST_DEVICE C10_ALWAYS_INLINE static Scalar value(Scalar x) {
    return x * Math::normal(x).cdf;
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static ActivationGradient<Scalar> backward(Scalar grad_h,
                                                                               Scalar x) {
    const NormalPoint<Scalar> point = Math::normal(x);
    return {grad_h * (point.cdf + x * point.pdf), x * point.cdf};
  }
};

// With u = sqrt(2 / pi) * (x + 0.044715 * x^3), the factor 0.5 * (1 + tanh(u)) of x is sigmoid(2u),
// which keeps its relative accuracy where tanh(u) is near -1.
template <typename Math>
struct Formula<Math, Activation::kGeluTanh> {
  using Scalar = typename Math::Scalar;

  static constexpr Scalar kTwoSqrtTwoOverPi = Scalar(1.5957691216057307117597842397375);
  static constexpr Scalar kCubic = Scalar(0.044715);

  C10_HOST_DEVICE C10_ALWAYS_INLINE static Scalar value(Scalar x) {
    const Scalar y = clamp_x(x);
    return x / (Scalar(1) + Math::exp(-twice_u(y)));
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static ActivationGradient<Scalar> backward(Scalar grad_h,
                                                                               Scalar x) {
    const Scalar y = clamp_x(x);
    const Logistic<Scalar> sigmoid = logistic<Math>(twice_u(y));
    const Scalar twice_u_slope = kTwoSqrtTwoOverPi * (Scalar(1) + Scalar(3) * kCubic * y * y);
    const Scalar slope = sigmoid.value + x * (sigmoid.slope * twice_u_slope);
    return {grad_h * slope, x * sigmoid.value};
  }

 private:
  // The sigmoid reaches 0 or 1 long before |x| = 40; the bound keeps y * y finite for finite x. The
  // bound drops NaN, but the results keep NaN, because they multiply by x itself.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static Scalar clamp_x(Scalar x) {
    const Scalar above = x > Scalar(-40) ? x : Scalar(-40);
    return above < Scalar(40) ? above : Scalar(40);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static Scalar twice_u(Scalar y) {
    return kTwoSqrtTwoOverPi * y * (Scalar(1) + kCubic * y * y);
  }
};

// Selections, not products: relu'(x) = 0 gives a zero gradient also where grad_h is infinite.
template <typename Math>
struct Formula<Math, Activation::kRelu> {
  using Scalar = typename Math::Scalar;

  C10_HOST_DEVICE C10_ALWAYS_INLINE static Scalar value(Scalar x) {
    return x <= Scalar(0) ? Scalar(0) : x;
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static ActivationGradient<Scalar> backward(Scalar grad_h,
                                                                               Scalar x) {
    return {x <= Scalar(0) ? Scalar(0) : grad_h, value(x)};
  }
};

template <typename Scalar>
struct GatedGradient {
  Scalar grad_gate;
  Scalar grad_up;
  Scalar h;
};

// The gradients of h = act(gate) * up.
template <typename Math, Activation kActivation>
C10_HOST_DEVICE C10_ALWAYS_INLINE GatedGradient<typename Math::Scalar> gated_gradient(
    typename Math::Scalar grad_h, typename Math::Scalar gate, typename Math::Scalar up) {
  const auto activated = Formula<Math, kActivation>::backward(grad_h * up, gate);
  return {activated.grad_x, grad_h * activated.h, activated.h * up};
}

}  // namespace weft::kernels::detail
