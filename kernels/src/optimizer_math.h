#pragma once

#include "optimizer_step_job.h"

#include <c10/macros/Macros.h>

#include <cmath>

// The formulae of one optimizer step for one element, in float32, shared by all devices: those of
// torch's Adam, AdamW and SGD. `Real` is float, or a vector of them.
namespace weft::kernels::detail {

// Replaces the moments. `kDecaysGrad`: whether constants.grad_decay is not 0. A factor of 0 would
// turn an infinite parameter into a NaN. Without decay, the parameter is not read.
template <bool kDecaysGrad, typename Real>
C10_HOST_DEVICE C10_ALWAYS_INLINE void adam_moments(
    const AdamConstants& constants, Real parameter, Real grad, Real& exp_avg, Real& exp_avg_sq) {
  Real g = grad * constants.grad_sign;
  if constexpr (kDecaysGrad) g += constants.grad_decay * parameter;
  // torch's lerp(exp_avg, g, 1 - beta1), which starts from the nearer end.
  Real start = exp_avg;
  if (constants.starts_at_grad > 0) start = g;
  exp_avg = start + constants.exp_avg_weight * (g - exp_avg);
  exp_avg_sq = constants.beta2 * exp_avg_sq + constants.exp_avg_sq_weight * g * g;
}

// Returns the new parameter. `root`: the square root of the new second moment.
template <typename Real>
C10_HOST_DEVICE C10_ALWAYS_INLINE Real
adam_parameter(const AdamConstants& constants, Real parameter, Real exp_avg, Real root) {
  const Real denominator = root * constants.root_factor + constants.eps;
  return parameter * constants.parameter_decay - constants.step_size * exp_avg / denominator;
}

// Replaces the moments and returns the new parameter; `root` receives the square root of the new
// second moment.
template <bool kDecaysGrad>
C10_HOST_DEVICE C10_ALWAYS_INLINE float adam_element(const AdamConstants& constants,
                                                     float parameter,
                                                     float grad,
                                                     float& exp_avg,
                                                     float& exp_avg_sq,
                                                     float& root) {
  float m = exp_avg;
  float v = exp_avg_sq;
  adam_moments<kDecaysGrad>(constants, parameter, grad, m, v);
  root = std::sqrt(v);
  exp_avg = m;
  exp_avg_sq = v;
  return adam_parameter(constants, parameter, m, root);
}

template <bool kDecaysGrad, typename Real>
C10_HOST_DEVICE C10_ALWAYS_INLINE Real
momentum_element(const MomentumConstants& constants, Real parameter, Real grad, Real& buffer) {
  Real g = grad * constants.grad_sign;
  if constexpr (kDecaysGrad) g += constants.grad_decay * parameter;
  buffer = constants.momentum * buffer + constants.grad_weight * g;
  if (constants.is_first > 0) buffer = g;
  Real update = buffer;
  if (constants.nesterov > 0) update = g + constants.momentum * buffer;
  return parameter - constants.lr * update;
}

}  // namespace weft::kernels::detail
