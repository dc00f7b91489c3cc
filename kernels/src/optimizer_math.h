#pragma once

#include "optimizer_step_job.h"

#include <c10/macros/Macros.h>

#include <cmath>

// The formulae of one optimizer step for one element, in float32, shared by all devices: those of
// torch's Adam, AdamW and SGD.
namespace weft::kernels::detail {

// `kDecaysGrad`: whether constants.grad_decay is not 0. A factor of 0 would turn an infinite
// parameter into a NaN. Replaces the moments and returns the new parameter; `root` receives the
// square root of the new second moment.
template <bool kDecaysGrad>
C10_HOST_DEVICE C10_ALWAYS_INLINE float adam_element(const AdamConstants& constants,
                                                     float parameter,
                                                     float grad,
                                                     float& exp_avg,
                                                     float& exp_avg_sq,
                                                     float& root) {
  float g = grad * constants.grad_sign;
  if constexpr (kDecaysGrad) g += constants.grad_decay * parameter;
  // torch's lerp(exp_avg, g, 1 - beta1), which starts from the nearer end.
  const float start = constants.starts_at_grad > 0 ? g : exp_avg;
  const float m = start + constants.exp_avg_weight * (g - exp_avg);
  const float v = constants.beta2 * exp_avg_sq + constants.exp_avg_sq_weight * g * g;
  root = std::sqrt(v);
  const float denominator = root * constants.root_factor + constants.eps;
  exp_avg = m;
  exp_avg_sq = v;
  return parameter * constants.parameter_decay - constants.step_size * m / denominator;
}

template <bool kDecaysGrad>
C10_HOST_DEVICE C10_ALWAYS_INLINE float momentum_element(const MomentumConstants& constants,
                                                         float parameter,
                                                         float grad,
                                                         float& buffer) {
  float g = grad * constants.grad_sign;
  if constexpr (kDecaysGrad) g += constants.grad_decay * parameter;
  const float later = constants.momentum * buffer + constants.grad_weight * g;
  buffer = constants.is_first > 0 ? g : later;
  const float update = constants.nesterov > 0 ? g + constants.momentum * buffer : buffer;
  return parameter - constants.lr * update;
}

}  // namespace weft::kernels::detail
