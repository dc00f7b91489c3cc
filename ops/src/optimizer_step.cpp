// Optimizer steps, and conversions of the formats of their states and parameters: the Meta kernels,
// which check the arguments as the device kernels do, and the registrations for autograd. None has
// a gradient: a backward through a conversion raises an error, as does a step of a leaf that
// requires a gradient, unless gradients are disabled.

#include "optimizer_adapters.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>

namespace weft::ops {

namespace {

struct MetaSteps {
  static constexpr auto adam_step = kernels::check_adam_step;
  static constexpr auto momentum_step = kernels::check_momentum_step;
};

at::Tensor empty_of_type(const at::Tensor& x, at::ScalarType type) {
  return at::empty_symint(x.sym_sizes(), x.options().dtype(type));
}

struct MetaCodes {
  static std::tuple<at::Tensor, at::Tensor> split_float(const at::Tensor& x,
                                                        at::ScalarType low_dtype) {
    kernels::check_split_float(x, low_dtype);
    return {empty_of_type(x, at::kBFloat16), empty_of_type(x, low_dtype)};
  }

  static at::Tensor join_float(const at::Tensor& high, const at::Tensor& low) {
    kernels::check_join_float(high, low);
    return empty_of_type(high, at::kFloat);
  }

  static std::tuple<at::Tensor, at::Tensor> quantize_blocks(const at::Tensor& x,
                                                            bool signed_codes) {
    kernels::check_quantize_blocks(x);
    return {empty_of_type(x, signed_codes ? at::kChar : at::kByte),
            at::empty_symint(kernels::scale_shape(x.sym_sizes()), x.options())};
  }

  static at::Tensor dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale) {
    kernels::check_dequantize_blocks(codes, scale);
    return empty_of_type(codes, at::kFloat);
  }
};

constexpr const char* kSteps[] = {"adam_step_", "momentum_step_"};
constexpr const char* kConversions[] = {
    "split_float", "join_float", "quantize_blocks", "dequantize_blocks"};

}  // namespace

TORCH_LIBRARY_IMPL(weft, Meta, m) {
  OptimizerStepAdapters<MetaSteps>::register_steps(m);
  register_float_codes<MetaCodes>(m);
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  for (const char* name : kSteps) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
  for (const char* name : kConversions) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

// Increases the versions of the tensors that a step changes.
TORCH_LIBRARY_IMPL(weft, ADInplaceOrView, m) {
  for (const char* name : kSteps) {
    m.impl(name, torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  }
}

}  // namespace weft::ops
