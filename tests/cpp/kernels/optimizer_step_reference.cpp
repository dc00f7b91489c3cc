#include "optimizer_step_reference.h"

#include "low_precision.h"
#include "optimizer_math.h"
#include "optimizer_step_entry.h"

namespace weft::kernels::testing::optimizer {
namespace {

using detail::OptimizerStepJob;
using detail::StateFormat;
using detail::WeightFormat;

template <typename Value>
Value& at(void* data, int64_t i) {
  return static_cast<Value*>(data)[i];
}
template <typename Value>
const Value& at(const void* data, int64_t i) {
  return static_cast<const Value*>(data)[i];
}

float load_weight(const OptimizerStepJob& job, int64_t i) {
  switch (job.weight_format) {
    case WeightFormat::kFloat32:
      return at<float>(job.parameter, i);
    case WeightFormat::kBFloat16:
      return detail::from_bfloat16(at<uint16_t>(job.parameter, i));
    case WeightFormat::kSplit16:
      return detail::join(at<uint16_t>(job.parameter, i), at<int16_t>(job.low_bits, i));
    case WeightFormat::kSplit8:
      return detail::join(at<uint16_t>(job.parameter, i), at<int8_t>(job.low_bits, i) * 256);
  }
  return 0;
}

void store_weight(const OptimizerStepJob& job, int64_t i, float x) {
  if (job.weight_format == WeightFormat::kFloat32) {
    at<float>(job.parameter, i) = x;
  } else if (job.weight_format == WeightFormat::kBFloat16) {
    at<uint16_t>(job.parameter, i) = detail::to_bfloat16_nearest(x);
  } else {
    const bool is_narrow = job.weight_format == WeightFormat::kSplit8;
    const auto split = detail::split(x, is_narrow);
    at<uint16_t>(job.parameter, i) = split.high;
    if (is_narrow) {
      at<int8_t>(job.low_bits, i) = static_cast<int8_t>(split.low / 256);
    } else {
      at<int16_t>(job.low_bits, i) = split.low;
    }
  }
}

template <bool kIsSecond>
float load_state(const OptimizerStepJob& job,
                 const detail::StateArray& state,
                 int64_t i,
                 float scale) {
  if (job.state_format == StateFormat::kFloat32) return at<float>(state.values, i);
  if (job.state_format == StateFormat::kBFloat16) {
    return detail::from_bfloat16(at<uint16_t>(state.values, i));
  }
  const float step = detail::code_step(scale, detail::kLargestCode<kIsSecond>);
  return kIsSecond ? detail::from_unsigned_code(at<uint8_t>(state.values, i), step)
                   : detail::from_signed_code(at<int8_t>(state.values, i), step);
}

template <bool kIsSecond>
void store_state(const OptimizerStepJob& job,
                 const detail::StateArray& state,
                 int64_t i,
                 float x,
                 float scale,
                 uint32_t random) {
  const int32_t units = detail::random_units<kIsSecond>(random);
  if (job.state_format == StateFormat::kFloat32) {
    at<float>(state.values, i) = x;
  } else if (job.state_format == StateFormat::kBFloat16) {
    at<uint16_t>(state.values, i) = detail::to_bfloat16_stochastic(x, units);
  } else if (scale != scale) {
    at<int8_t>(state.values, i) = 0;
  } else {
    const float factor = detail::code_factor(scale, detail::kLargestCode<kIsSecond>);
    const float u = static_cast<float>(units) / 65536;
    if (kIsSecond) {
      at<uint8_t>(state.values, i) =
          static_cast<uint8_t>(detail::unsigned_code(std::sqrt(x), factor, u));
    } else {
      at<int8_t>(state.values, i) = static_cast<int8_t>(detail::signed_code(x, factor, u));
    }
  }
}

// Steps a block: `element(parameter, grad, first, second)` replaces the states and returns the new
// parameter.
template <typename Element>
void step_block(
    const OptimizerStepJob& job, int64_t row, int64_t column, int64_t idx, const Element& element) {
  const bool has_second = job.second.values != nullptr;
  const bool has_codes = job.state_format == StateFormat::kCodes;
  const int64_t size = std::min(detail::kCodeBlock, job.row_size - column);
  const int64_t begin = row * job.row_size + column;
  std::vector<float> first, second;
  int32_t largest_first = 0, largest_second = 0;
  for (int64_t i = begin; i < begin + size; ++i) {
    const float grad = job.has_bfloat16_grad ? detail::from_bfloat16(at<uint16_t>(job.grad, i))
                                             : at<float>(job.grad, i);
    float m = load_state<false>(job, job.first, i, has_codes ? job.first.scales[idx] : 0);
    float v = has_second
                  ? load_state<true>(job, job.second, i, has_codes ? job.second.scales[idx] : 0)
                  : 0;
    store_weight(job, i, element(load_weight(job, i), grad, m, v));
    largest_first = std::max(largest_first, detail::magnitude(m));
    largest_second = std::max(largest_second, detail::magnitude(v));
    first.push_back(m);
    second.push_back(v);
  }
  if (has_codes) {
    job.first.scales[idx] = detail::scale_of(largest_first);
    if (has_second) job.second.scales[idx] = detail::scale_of(largest_second);
  }
  for (int64_t i = 0; i < size; ++i) {
    const auto position =
        static_cast<uint64_t>((job.row + row) * job.full_columns + job.column + column + i);
    const auto key = detail::random_key(job.seed, job.step, static_cast<uint32_t>(position >> 32));
    const uint32_t random = detail::mix(static_cast<uint32_t>(position), key);
    const auto k = static_cast<std::size_t>(i);
    store_state<false>(
        job, job.first, begin + i, first[k], has_codes ? job.first.scales[idx] : 0, random);
    if (has_second) {
      store_state<true>(
          job, job.second, begin + i, second[k], has_codes ? job.second.scales[idx] : 0, random);
    }
  }
}

template <typename Element>
void step_matrix(const OptimizerStepJob& job, const Element& element) {
  int64_t idx = 0;
  for (int64_t row = 0; row < job.num_rows; ++row) {
    for (int64_t column = 0; column < job.row_size; column += detail::kCodeBlock) {
      step_block(job, row, column, idx++, element);
    }
  }
}

at::Tensor random_state(States states,
                        at::IntArrayRef sizes,
                        std::optional<at::Tensor>& scale,
                        bool is_signed) {
  at::Tensor x = at::randn(sizes) * 0.5;
  if (!is_signed) x = x * x;
  if (states == States::kFloat32) return x;
  if (states == States::kBFloat16) return x.to(at::kBFloat16);
  auto [codes, scales] = cpu::quantize_blocks(x, is_signed);
  scale = scales;
  return codes;
}

}  // namespace

Tensors random_tensors(const Format& format, at::IntArrayRef sizes) {
  Tensors tensors;
  tensors.parameter = at::randn(sizes);
  if (format.weights == Weights::kSplit16 || format.weights == Weights::kSplit8) {
    std::tie(tensors.parameter, tensors.low_bits) = cpu::split_float(
        tensors.parameter, format.weights == Weights::kSplit16 ? at::kShort : at::kChar);
  } else if (format.weights == Weights::kBFloat16) {
    tensors.parameter = tensors.parameter.to(at::kBFloat16);
  }
  tensors.grad = at::randn(sizes).to(format.has_bfloat16_grad ? at::kBFloat16 : at::kFloat);
  tensors.first = random_state(format.states, sizes, tensors.first_scale, true);
  tensors.second = random_state(format.states, sizes, tensors.second_scale, false);
  return tensors;
}

void reference_adam(const AdamStep& step) {
  if (step.parameter.numel() == 0) return;
  const auto job = detail::adam_step_job(step);
  step_matrix(job, [&](float parameter, float grad, float& m, float& v) {
    float root = 0;
    return job.constants.grad_decay != 0
               ? detail::adam_element<true>(job.constants, parameter, grad, m, v, root)
               : detail::adam_element<false>(job.constants, parameter, grad, m, v, root);
  });
}

void reference_momentum(const MomentumStep& step) {
  if (step.parameter.numel() == 0) return;
  const auto job = detail::momentum_step_job(step);
  step_matrix(job, [&](float parameter, float grad, float& m, float& /*v*/) {
    return job.constants.grad_decay != 0
               ? detail::momentum_element<true>(job.constants, parameter, grad, m)
               : detail::momentum_element<false>(job.constants, parameter, grad, m);
  });
}

}  // namespace weft::kernels::testing::optimizer
