// The conjugate pair for users' own layers: copy_to_group (identity forward, all-reduce backward)
// and reduce_from_group (all-reduce forward, identity backward). Below autograd, reduce_from_group
// is also the functional all-reduce of the other operators' backwards, which compile and export
// trace.

#include "autograd_support.h"
#include "dispatch.h"
#include "group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <string>

namespace weft::ops {

namespace {

constexpr std::string_view kCopy = "weft::copy_to_group";
constexpr std::string_view kReduce = "weft::reduce_from_group";

at::Tensor copy_to_group(const at::Tensor& x, std::string_view group_name) {
  resolve_group(kCopy, std::string(group_name));  // raises here rather than in the backward
  return x.clone();
}

at::Tensor reduce_from_group(const at::Tensor& x, std::string_view group_name) {
  const auto group = resolve_group(kReduce, std::string(group_name));
  auto y = x.clone(at::MemoryFormat::Contiguous);
  all_reduce_(kReduce, y, group);
  return y;
}

class CopyToGroup : public torch::autograd::Function<CopyToGroup> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const std::string& group_name) {
    ctx->saved_data["group_name"] = group_name;
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::copy_to_group(x, group_name);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kCopy);
    return {dispatch::reduce_from_group(grads[0], ctx->saved_data.at("group_name").toStringRef()),
            at::Tensor()};
  }
};

class ReduceFromGroup : public torch::autograd::Function<ReduceFromGroup> {
 public:
  static at::Tensor forward(AutogradContext* /*ctx*/,
                            const at::Tensor& x,
                            const std::string& group_name) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::reduce_from_group(x, group_name);
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

at::Tensor copy_to_group_autograd(const at::Tensor& x, std::string_view group_name) {
  return CopyToGroup::apply(x, std::string(group_name));
}

at::Tensor reduce_from_group_autograd(const at::Tensor& x, std::string_view group_name) {
  return ReduceFromGroup::apply(x, std::string(group_name));
}

at::Tensor copy_to_group_meta(const at::Tensor& x, std::string_view /*group_name*/) {
  return at::empty_like(x);
}

at::Tensor reduce_from_group_meta(const at::Tensor& x, std::string_view /*group_name*/) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

void register_kernels(torch::Library& m) {
  m.impl("copy_to_group", TORCH_FN(copy_to_group));
  m.impl("reduce_from_group", TORCH_FN(reduce_from_group));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("copy_to_group", TORCH_FN(copy_to_group_meta));
  m.impl("reduce_from_group", TORCH_FN(reduce_from_group_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("copy_to_group", TORCH_FN(copy_to_group_autograd));
  m.impl("reduce_from_group", TORCH_FN(reduce_from_group_autograd));
}

}  // namespace weft::ops
