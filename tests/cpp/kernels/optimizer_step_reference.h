#pragma once

#include <weft/kernels/float_codes.h>
#include <weft/kernels/optimizer_step.h>

#include <ATen/ATen.h>

#include <vector>

// The tensors of an optimizer step, and the same step by the element formulae of kernels/src, one
// element at a time on the host.
namespace weft::kernels::testing::optimizer {

enum class Weights { kFloat32, kBFloat16, kSplit16, kSplit8 };
enum class States { kFloat32, kBFloat16, kCodes };

struct Format {
  Weights weights;
  bool has_bfloat16_grad;
  States states;
};

struct Tensors {
  at::Tensor parameter;
  std::optional<at::Tensor> low_bits;
  at::Tensor grad;
  at::Tensor first;
  std::optional<at::Tensor> first_scale;
  at::Tensor second;
  std::optional<at::Tensor> second_scale;

  // Returns the tensors that a step changes.
  std::vector<at::Tensor> changed() const {
    std::vector<at::Tensor> all = {parameter, first, second};
    for (const auto& each : {low_bits, first_scale, second_scale}) {
      if (each.has_value()) all.push_back(*each);
    }
    return all;
  }

  Tensors copy_on(c10::Device device) const {
    const auto copy = [device](const at::Tensor& x) {
      return x.to(device, x.scalar_type(), false, true);
    };
    const auto optional_copy = [&](const std::optional<at::Tensor>& x) {
      return x.has_value() ? std::optional(copy(*x)) : std::nullopt;
    };
    return {copy(parameter),
            optional_copy(low_bits),
            copy(grad),
            copy(first),
            optional_copy(first_scale),
            copy(second),
            optional_copy(second_scale)};
  }

  AdamStep adam(const StepPlace& place, bool decoupled) const {
    return {.parameter = parameter,
            .grad = grad,
            .exp_avg = first,
            .exp_avg_scale = first_scale,
            .exp_avg_sq = second,
            .exp_avg_sq_scale = second_scale,
            .low_bits = low_bits,
            .lr = 0.01,
            .beta1 = decoupled ? 0.9 : 0.4,
            .beta2 = 0.99,
            .eps = 1e-8,
            .weight_decay = 0.1,
            .decoupled_weight_decay = decoupled,
            .maximize = !decoupled,
            .place = place};
  }

  MomentumStep momentum(const StepPlace& place, bool nesterov) const {
    return {.parameter = parameter,
            .grad = grad,
            .momentum_buffer = first,
            .momentum_scale = first_scale,
            .low_bits = low_bits,
            .lr = 0.01,
            .momentum = 0.9,
            .dampening = nesterov ? 0.0 : 0.3,
            .weight_decay = nesterov ? 0.1 : 0.0,
            .nesterov = nesterov,
            .maximize = false,
            .place = place};
  }
};

// Returns random tensors on the CPU, with states of earlier steps.
Tensors random_tensors(const Format& format, at::IntArrayRef sizes);

// Make a step of tensors on the CPU.
void reference_adam(const AdamStep& step);
void reference_momentum(const MomentumStep& step);

}  // namespace weft::kernels::testing::optimizer
