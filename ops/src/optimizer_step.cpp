// Optimizer steps, and conversions of the formats of their states and parameters: the Meta kernels,
// which check the arguments as the device kernels do, and the registrations for autograd. None has
// a gradient: a backward through a conversion raises an error, as does a step of a tensor that
// requires a gradient, unless gradients are disabled.

#include "dispatch.h"
#include "optimizer_adapters.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>
#include <type_traits>

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

using dispatch::OptionalTensor;

const at::Tensor* tensor_of(const at::Tensor& tensor) { return &tensor; }
const at::Tensor* tensor_of(const OptionalTensor& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}
template <typename Other>
const at::Tensor* tensor_of(const Other& /*option*/) {
  return nullptr;
}

void check_without_gradient(std::string_view op, const at::Tensor* changed) {
  TORCH_CHECK_VALUE(changed == nullptr || !changed->requires_grad() || !at::GradMode::is_enabled(),
                    op,
                    ": got a tensor that requires a gradient, which the step would change; call it "
                    "under torch.no_grad().");
}

void increase_version(const at::Tensor* changed) {
  if (changed != nullptr && !changed->is_inference()) {
    changed->unsafeGetTensorImpl()->bump_version();
  }
}

// The autograd kernel of a step, which changes all tensors but the second argument, the gradient.
template <typename Operator>
struct StepAutograd;

template <auto kName, typename Parameter, typename Grad, typename... Others>
struct StepAutograd<dispatch::Operator<kName, void(Parameter, Grad, Others...)>> {
  static void call(Parameter parameter, Grad grad, Others... others) {
    const dispatch::Operator<kName, void(Parameter, Grad, Others...)> op;
    check_without_gradient(op.name(), tensor_of(parameter));
    (check_without_gradient(op.name(), tensor_of(others)), ...);
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op(parameter, grad, others...);
    }
    increase_version(tensor_of(parameter));
    (increase_version(tensor_of(others)), ...);
  }
};

using AdamAutograd = StepAutograd<std::remove_const_t<decltype(dispatch::adam_step_)>>;
using MomentumAutograd = StepAutograd<std::remove_const_t<decltype(dispatch::momentum_step_)>>;

constexpr const char* kConversions[] = {
    "split_float", "join_float", "quantize_blocks", "dequantize_blocks"};

}  // namespace

TORCH_LIBRARY_IMPL(weft, Meta, m) {
  OptimizerStepAdapters<MetaSteps>::register_steps(m);
  register_float_codes<MetaCodes>(m);
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("adam_step_", TORCH_FN(AdamAutograd::call));
  m.impl("momentum_step_", TORCH_FN(MomentumAutograd::call));
  for (const char* name : kConversions) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace weft::ops
