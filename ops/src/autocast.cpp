// Under torch.autocast the matrix-product operators run in the autocast dtype, as nn.Linear does;
// the embedding and the group operators keep the dtype of their input.

#include "dispatch.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

template <c10::DeviceType kDevice>
class Cast {
 public:
  at::Tensor operator()(const at::Tensor& tensor) const {
    return at::autocast::cached_cast(dtype_, tensor, kDevice);
  }
  dispatch::OptionalTensor operator()(const dispatch::OptionalTensor& tensor) const {
    return tensor.has_value() ? dispatch::OptionalTensor((*this)(*tensor)) : std::nullopt;
  }

 private:
  at::ScalarType dtype_ = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
};

template <c10::DeviceType kDevice>
struct Autocast {
  static constexpr auto kKey = kDevice == c10::DeviceType::CPU ? c10::DispatchKey::AutocastCPU
                                                               : c10::DispatchKey::AutocastCUDA;

  static at::Tensor column_row_mlp(const at::Tensor& x,
                                   const at::Tensor& w1,
                                   const at::Tensor& w2,
                                   const dispatch::OptionalTensor& w3,
                                   const dispatch::OptionalTensor& b1,
                                   const dispatch::OptionalTensor& b2,
                                   const dispatch::OptionalTensor& b3,
                                   std::string_view activation,
                                   std::string_view group_name,
                                   bool recompute,
                                   std::optional<std::int64_t> sequence_dim,
                                   std::optional<c10::SymInt> sequence_size) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::column_row_mlp(cast(x),
                                    cast(w1),
                                    cast(w2),
                                    cast(w3),
                                    cast(b1),
                                    cast(b2),
                                    cast(b3),
                                    activation,
                                    group_name,
                                    recompute,
                                    sequence_dim,
                                    std::move(sequence_size));
  }

  static at::Tensor column_linear(const at::Tensor& x,
                                  const at::Tensor& weight,
                                  const dispatch::OptionalTensor& bias,
                                  std::string_view group_name) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::column_linear(cast(x), cast(weight), cast(bias), group_name);
  }

  static at::Tensor row_linear(const at::Tensor& x,
                               const at::Tensor& weight,
                               const dispatch::OptionalTensor& bias,
                               std::string_view group_name) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::row_linear(cast(x), cast(weight), cast(bias), group_name);
  }

  static at::Tensor all_gather_linear(const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const dispatch::OptionalTensor& bias,
                                      std::int64_t gather_dim,
                                      std::string_view group_name,
                                      std::optional<c10::SymInt> dim_size) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::all_gather_linear(
        cast(x), cast(weight), cast(bias), gather_dim, group_name, std::move(dim_size));
  }

  static at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const dispatch::OptionalTensor& bias,
                                          std::int64_t scatter_dim,
                                          std::string_view group_name) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::linear_reduce_scatter(
        cast(x), cast(weight), cast(bias), scatter_dim, group_name);
  }

  static at::Tensor sharded_linear(const at::Tensor& x,
                                   const at::Tensor& weight,
                                   const dispatch::OptionalTensor& bias,
                                   std::string_view group_name,
                                   std::optional<c10::SymInt> out_features) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::sharded_linear(
        cast(x), cast(weight), cast(bias), group_name, std::move(out_features));
  }

  // The product runs in the autocast dtype; the losses are computed in float32 whatever it is.
  static at::Tensor linear_cross_entropy(const at::Tensor& x,
                                         const at::Tensor& weight,
                                         const at::Tensor& target,
                                         std::int64_t vocab_start,
                                         std::string_view group_name,
                                         std::optional<std::int64_t> vocab_size,
                                         std::int64_t ignore_index,
                                         double label_smoothing,
                                         std::string_view reduction) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const Cast<kDevice> cast;
    return dispatch::vocab_parallel_linear_cross_entropy(cast(x),
                                                         cast(weight),
                                                         target,
                                                         vocab_start,
                                                         group_name,
                                                         vocab_size,
                                                         ignore_index,
                                                         label_smoothing,
                                                         reduction);
  }

  // The norms are computed in float32 whatever comes in; only the two terms of a sum must agree.
  static std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                         const at::Tensor& residual,
                                                         const dispatch::OptionalTensor& weight,
                                                         std::string_view group_name,
                                                         double eps) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const auto dtype = at::promote_types(x.scalar_type(), residual.scalar_type());
    return dispatch::add_rms_norm(x.to(dtype), residual.to(dtype), weight, group_name, eps);
  }

  static std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x,
                                                           const at::Tensor& residual,
                                                           const dispatch::OptionalTensor& weight,
                                                           const dispatch::OptionalTensor& bias,
                                                           std::string_view group_name,
                                                           double eps) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
    const auto dtype = at::promote_types(x.scalar_type(), residual.scalar_type());
    return dispatch::add_layer_norm(x.to(dtype), residual.to(dtype), weight, bias, group_name, eps);
  }

  static void register_kernels(torch::Library& m) {
    m.impl("column_row_mlp", TORCH_FN(column_row_mlp));
    m.impl("column_linear", TORCH_FN(column_linear));
    m.impl("add_rms_norm", TORCH_FN(add_rms_norm));
    m.impl("add_layer_norm", TORCH_FN(add_layer_norm));
    m.impl("row_linear", TORCH_FN(row_linear));
    m.impl("sharded_linear", TORCH_FN(sharded_linear));
    m.impl("vocab_parallel_linear_cross_entropy", TORCH_FN(linear_cross_entropy));
    m.impl("all_gather_linear", TORCH_FN(all_gather_linear));
    m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(weft, AutocastCPU, m) { Autocast<c10::DeviceType::CPU>::register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, AutocastCUDA, m) { Autocast<c10::DeviceType::CUDA>::register_kernels(m); }

}  // namespace weft::ops
