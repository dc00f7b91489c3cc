#pragma once

// Adapts the optimizer steps and the conversions of float formats in kernels/ to the schemas of
// their operators. Inline, because both libweft_ops.so and libweft_ops_cuda.so need it and neither
// exports it.

#include <weft/kernels/float_codes.h>
#include <weft/kernels/optimizer_step.h>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

namespace weft::ops {

// `Steps` has adam_step and momentum_step as static members: the kernels of one device, or checks.
template <typename Steps>
struct OptimizerStepAdapters {
  using OptionalTensor = std::optional<at::Tensor>;

  static void adam_step(const at::Tensor& parameter,
                        const at::Tensor& grad,
                        const at::Tensor& exp_avg,
                        const OptionalTensor& exp_avg_scale,
                        const at::Tensor& exp_avg_sq,
                        const OptionalTensor& exp_avg_sq_scale,
                        const OptionalTensor& low_bits,
                        std::int64_t step,
                        double lr,
                        double beta1,
                        double beta2,
                        double eps,
                        double weight_decay,
                        bool decoupled_weight_decay,
                        bool maximize,
                        std::int64_t seed,
                        std::int64_t row,
                        std::int64_t column,
                        std::int64_t full_columns) {
    Steps::adam_step({.parameter = parameter,
                      .grad = grad,
                      .exp_avg = exp_avg,
                      .exp_avg_scale = exp_avg_scale,
                      .exp_avg_sq = exp_avg_sq,
                      .exp_avg_sq_scale = exp_avg_sq_scale,
                      .low_bits = low_bits,
                      .lr = lr,
                      .beta1 = beta1,
                      .beta2 = beta2,
                      .eps = eps,
                      .weight_decay = weight_decay,
                      .decoupled_weight_decay = decoupled_weight_decay,
                      .maximize = maximize,
                      .place = {step, seed, row, column, full_columns}});
  }

  static void momentum_step(const at::Tensor& parameter,
                            const at::Tensor& grad,
                            const at::Tensor& momentum_buffer,
                            const OptionalTensor& momentum_scale,
                            const OptionalTensor& low_bits,
                            std::int64_t step,
                            double lr,
                            double momentum,
                            double dampening,
                            double weight_decay,
                            bool nesterov,
                            bool maximize,
                            std::int64_t seed,
                            std::int64_t row,
                            std::int64_t column,
                            std::int64_t full_columns) {
    Steps::momentum_step({.parameter = parameter,
                          .grad = grad,
                          .momentum_buffer = momentum_buffer,
                          .momentum_scale = momentum_scale,
                          .low_bits = low_bits,
                          .lr = lr,
                          .momentum = momentum,
                          .dampening = dampening,
                          .weight_decay = weight_decay,
                          .nesterov = nesterov,
                          .maximize = maximize,
                          .place = {step, seed, row, column, full_columns}});
  }

  static void register_steps(torch::Library& m) {
    m.impl("adam_step_", TORCH_FN(adam_step));
    m.impl("momentum_step_", TORCH_FN(momentum_step));
  }
};

// `Codes` has the conversions of one device as static members.
template <typename Codes>
void register_float_codes(torch::Library& m) {
  m.impl("split_float", TORCH_FN(Codes::split_float));
  m.impl("join_float", TORCH_FN(Codes::join_float));
  m.impl("quantize_blocks", TORCH_FN(Codes::quantize_blocks));
  m.impl("dequantize_blocks", TORCH_FN(Codes::dequantize_blocks));
}

}  // namespace weft::ops
