// Under torch.autocast, the operators with matrix products cast their tensors to the autocast
// dtype, as nn.Linear does, and add_rms_norm and add_layer_norm promote x and residual to a common
// dtype. Other operators do not cast: the other norms, the embedding, the cross-entropy of given
// logits, dropout, and the group, expert and pipeline operators.

#include "dispatch.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string_view>
#include <utility>

namespace weft::ops {

namespace {

template <c10::DeviceType kDevice>
constexpr auto kAutocastKey = kDevice == c10::DeviceType::CPU ? c10::DispatchKey::AutocastCPU
                                                              : c10::DispatchKey::AutocastCUDA;

// Casts floating-point tensors on devices of kDevice to the autocast dtype. Other arguments are not
// cast: float64, integers such as targets, tensors on other devices, and arguments that are no
// tensors.
template <c10::DeviceType kDevice>
class Cast {
 public:
  at::Tensor operator()(const at::Tensor& tensor) const {
    return at::autocast::cached_cast(dtype_, tensor, kDevice);
  }
  dispatch::OptionalTensor operator()(const dispatch::OptionalTensor& tensor) const {
    return tensor.has_value() ? dispatch::OptionalTensor((*this)(*tensor)) : std::nullopt;
  }
  template <typename Other>
  Other operator()(Other argument) const {
    return argument;
  }

 private:
  at::ScalarType dtype_ = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
};

// The autocast kernel of an operator with matrix products: casts its arguments.
template <c10::DeviceType kDevice, typename Operator>
struct InAutocastDtype;

template <c10::DeviceType kDevice, auto kName, typename Result, typename... Arguments>
struct InAutocastDtype<kDevice, dispatch::Operator<kName, Result(Arguments...)>> {
  static Result call(Arguments... arguments) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<kDevice>);
    const Cast<kDevice> cast;
    const dispatch::Operator<kName, Result(Arguments...)> op;
    return op(cast(std::forward<Arguments>(arguments))...);
  }
};

// The autocast kernel of a norm of a sum: x and residual are promoted to a common dtype, because
// the kernel requires equal dtypes. The norm is computed in float32, or in float64 for float64.
template <c10::DeviceType kDevice, typename Operator>
struct InPromotedDtype;

template <c10::DeviceType kDevice, auto kName, typename Result, typename... Arguments>
struct InPromotedDtype<
    kDevice,
    dispatch::Operator<kName, Result(const at::Tensor&, const at::Tensor&, Arguments...)>> {
  static Result call(const at::Tensor& x, const at::Tensor& residual, Arguments... arguments) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<kDevice>);
    const auto dtype = at::promote_types(x.scalar_type(), residual.scalar_type());
    const dispatch::Operator<kName, Result(const at::Tensor&, const at::Tensor&, Arguments...)> op;
    return op(x.to(dtype), residual.to(dtype), std::forward<Arguments>(arguments)...);
  }
};

template <template <c10::DeviceType, typename> typename Kernel,
          c10::DeviceType kDevice,
          typename... Operators>
void register_kernels(torch::Library& m, Operators... operators) {
  (m.impl(operators.name(), TORCH_FN((Kernel<kDevice, Operators>::call))), ...);
}

template <c10::DeviceType kDevice>
void register_all(torch::Library& m) {
  register_kernels<InAutocastDtype, kDevice>(m,
                                             dispatch::column_row_mlp,
                                             dispatch::column_linear,
                                             dispatch::row_linear,
                                             dispatch::all_gather_linear,
                                             dispatch::linear_reduce_scatter,
                                             dispatch::sharded_linear,
                                             dispatch::vocab_parallel_linear_cross_entropy,
                                             dispatch::ring_attention,
                                             dispatch::ulysses_attention,
                                             dispatch::grouped_linear);
  register_kernels<InPromotedDtype, kDevice>(m, dispatch::add_rms_norm, dispatch::add_layer_norm);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, AutocastCPU, m) { register_all<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(weft, AutocastCUDA, m) { register_all<c10::DeviceType::CUDA>(m); }

}  // namespace weft::ops
