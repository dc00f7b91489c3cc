// column_row_mlp on a device: local products, one all-reduce, the row bias added after the sum. Of
// a cut sequence an all-gather before and a reduce-scatter instead.

#include "column_row_mlp.h"

#include "dispatch.h"
#include "group_collectives.h"
#include "reduced_products.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <string>

namespace weft::ops {

std::pair<at::Tensor, at::Tensor> column_half(const at::Tensor& x,
                                              const at::Tensor& w1,
                                              const OptionalTensor& w3,
                                              const OptionalTensor& b1,
                                              const OptionalTensor& b3) {
  return {at::linear(x, w1, b1), w3.has_value() ? at::linear(x, *w3, b3) : at::Tensor()};
}

at::Tensor activate(const at::Tensor& h1, const at::Tensor& h3, std::string_view activation) {
  return h3.defined() ? dispatch::gated_activation(h1, h3, activation)
                      : dispatch::activation(h1, activation);
}

namespace {

constexpr std::string_view kOp = "weft::column_row_mlp";

// The checked call, less what the halves compute.
struct Call {
  ProcessGroupPtr group;             // null for one rank
  std::optional<Sequence> sequence;  // of a group
};

Call checked_call(const at::Tensor& x,
                  const at::Tensor& w1,
                  const at::Tensor& w2,
                  const OptionalTensor& w3,
                  const OptionalTensor& b1,
                  const OptionalTensor& b2,
                  const OptionalTensor& b3,
                  std::string_view activation,
                  std::string_view group_name,
                  const std::optional<std::int64_t>& sequence_dim,
                  const std::optional<c10::SymInt>& sequence_size) {
  column_row_mlp_shape(x, w1, w2, w3, b1, b2, b3, activation);
  Call call{resolve_group(kOp, std::string(group_name)), std::nullopt};
  const auto sequence = mlp_sequence(x, sequence_dim, sequence_size, place_in(call.group));
  if (call.group) {
    call.sequence = sequence;
  }
  return call;
}

// x with all parts of the sequence.
at::Tensor whole(const at::Tensor& x, const Call& call) {
  if (!call.sequence.has_value()) {
    return x;
  }
  const auto& [dim, size] = *call.sequence;
  return all_gather(kOp, x, dim, size.expect_int(), call.group);
}

// h w2ᵀ summed over the group, + b2; of a sequence this rank's part.
at::Tensor row_half(const at::Tensor& h,
                    const at::Tensor& w2,
                    const OptionalTensor& b2,
                    const Call& call) {
  if (!call.group) {
    return at::linear(h, w2, b2);
  }
  auto y = call.sequence.has_value()
               ? reduce_scatter(kOp, at::linear(h, w2), call.sequence->dim, call.group)
               : reduced_linear(kOp, h, w2, call.group);
  return b2.has_value() ? y.add_(*b2) : y;
}

at::Tensor column_row_mlp(const at::Tensor& x,
                          const at::Tensor& w1,
                          const at::Tensor& w2,
                          const OptionalTensor& w3,
                          const OptionalTensor& b1,
                          const OptionalTensor& b2,
                          const OptionalTensor& b3,
                          std::string_view activation,
                          std::string_view group_name,
                          bool /*recompute: nothing is saved here*/,
                          std::optional<std::int64_t> sequence_dim,
                          std::optional<c10::SymInt> sequence_size) {
  const auto call =
      checked_call(x, w1, w2, w3, b1, b2, b3, activation, group_name, sequence_dim, sequence_size);
  at::Tensor h;
  {
    const auto [h1, h3] = column_half(whole(x, call), w1, w3, b1, b3);
    h = activate(h1, h3, activation);
  }
  return row_half(h, w2, b2, call);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_row_mlp_saving(
    const at::Tensor& x,
    const at::Tensor& w1,
    const at::Tensor& w2,
    const OptionalTensor& w3,
    const OptionalTensor& b1,
    const OptionalTensor& b2,
    const OptionalTensor& b3,
    std::string_view activation,
    std::string_view group_name,
    std::optional<std::int64_t> sequence_dim,
    std::optional<c10::SymInt> sequence_size) {
  const auto call =
      checked_call(x, w1, w2, w3, b1, b2, b3, activation, group_name, sequence_dim, sequence_size);
  const auto [h1, h3] = column_half(whole(x, call), w1, w3, b1, b3);
  auto y = row_half(activate(h1, h3, activation), w2, b2, call);
  return {y, h1, h3.defined() ? h3 : at::empty({0}, x.options())};
}

void register_kernels(torch::Library& m) {
  m.impl("column_row_mlp", TORCH_FN(column_row_mlp));
  m.impl("_column_row_mlp_saving", TORCH_FN(column_row_mlp_saving));
}

}  // namespace

// Products, activations and collectives dispatch on the device by themselves.
TORCH_LIBRARY_IMPL(weft, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_kernels(m); }

}  // namespace weft::ops
