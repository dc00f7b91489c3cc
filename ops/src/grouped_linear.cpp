// grouped_linear: a linear layer for each expert, of the rows that are the expert's. No rows are
// padded and no results are concatenated: on the CPU, the product of each expert that has rows is
// written into its rows of the result. On CUDA, bfloat16 uses torch's grouped product, for which
// the host does not read the counts; other dtypes compute as on the CPU (Gale et al., "MegaBlocks",
// 2022).

#include "autograd_support.h"
#include "dispatch.h"
#include "expert_rows.h"
#include "shape.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <cstdint>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kGrouped = "weft::grouped_linear";

// Checks the arguments; returns the shape of the result, [rows, out].
c10::SymDimVector grouped_linear_shape(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const at::Tensor& counts,
                                       const OptionalTensor& bias) {
  check_floating(kGrouped, x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2,
                    kGrouped,
                    ": got x of shape ",
                    x.sym_sizes(),
                    "; pass rows that are sorted by expert, [rows, in].");
  check_like_x(kGrouped, x, weight, "weight");
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.sym_size(2) == x.sym_size(1),
                    kGrouped,
                    ": got weight of shape ",
                    weight.sym_sizes(),
                    " with x of shape ",
                    x.sym_sizes(),
                    "; pass one matrix for each expert in nn.Linear's layout, [experts, out, in].");
  TORCH_CHECK_TYPE(counts.scalar_type() == at::kLong,
                   kGrouped,
                   ": got counts of dtype ",
                   counts.scalar_type(),
                   "; pass the number of rows of each expert as int64.");
  TORCH_CHECK_VALUE(counts.device() == x.device(),
                    kGrouped,
                    ": got counts on ",
                    counts.device(),
                    " with x on ",
                    x.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(counts.dim() == 1 && counts.sym_size(0) == weight.sym_size(0),
                    kGrouped,
                    ": got counts of shape ",
                    counts.sym_sizes(),
                    " with weight of shape ",
                    weight.sym_sizes(),
                    "; pass one number of rows for each expert.");
  if (bias.has_value()) {
    check_like_x(kGrouped, x, *bias, "bias");
    TORCH_CHECK_VALUE(bias->dim() == 2 && bias->sym_sizes() == weight.sym_sizes().slice(0, 2),
                      kGrouped,
                      ": got bias of shape ",
                      bias->sym_sizes(),
                      " with weight of shape ",
                      weight.sym_sizes(),
                      "; pass one row for each expert, [experts, out].");
  }
  return {x.sym_size(0), weight.sym_size(1)};
}

// The rows of an expert that has some.
struct ExpertRows {
  std::int64_t expert;
  std::int64_t begin;
  std::int64_t size;

  at::Tensor of(const at::Tensor& x) const { return x.narrow(0, begin, size); }
};

// Returns the rows of the experts that have some, in order. CUDA: waits for the device.
std::vector<ExpertRows> rows_of_experts(const at::Tensor& counts, std::int64_t num_rows) {
  std::vector<ExpertRows> result;
  std::int64_t begin = 0, expert = 0;
  bool is_valid = true;
  const auto sizes = host_counts(counts, num_rows);
  for (const auto size : sizes) {
    is_valid = is_valid && size >= 0 && size <= num_rows - begin;
    if (is_valid && size > 0) {
      result.push_back({expert, begin, size});
      begin += size;
    }
    ++expert;
  }
  TORCH_CHECK_VALUE(is_valid && begin == num_rows,
                    kGrouped,
                    ": got counts ",
                    at::IntArrayRef(sizes),
                    " for ",
                    num_rows,
                    " rows of x; pass the number of rows of each expert, whose sum is that of all "
                    "rows.");
  return result;
}

// Whether torch's grouped product computes with these tensors. Its rows are multiples of 16 bytes.
bool has_grouped_product(const at::Tensor& x, const at::Tensor& weight) {
  constexpr std::int64_t kMultiple = 8;
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.numel() > 0 && weight.numel() > 0 &&
         x.size(1) % kMultiple == 0 && weight.size(1) % kMultiple == 0;
}

// Returns a tensor of these values that torch's grouped product supports: rows or columns without
// gaps, which begin at a multiple of 16 bytes.
at::Tensor for_grouped_product(const at::Tensor& x) {
  const auto address = reinterpret_cast<std::uintptr_t>(x.const_data_ptr());
  const bool is_dense = x.is_contiguous() || x.transpose(-2, -1).is_contiguous();
  return is_dense && address % 16 == 0 ? x : x.clone(at::MemoryFormat::Contiguous);
}

// Returns the ends of the experts' rows, as torch's grouped product takes them.
at::Tensor ends_of(const at::Tensor& counts) { return counts.cumsum(0).to(at::kInt); }

// Returns the expert of each row.
at::Tensor experts_of_rows(const at::Tensor& counts, std::int64_t num_rows) {
  return at::searchsorted(counts.cumsum(0),
                          at::arange(num_rows, counts.options()),
                          /*out_int32=*/false,
                          /*right=*/true);
}

at::Tensor grouped_linear(const at::Tensor& x,
                          const at::Tensor& weight,
                          const at::Tensor& counts,
                          const OptionalTensor& bias) {
  const auto shape = grouped_linear_shape(x, weight, counts, bias);
  if (has_grouped_product(x, weight)) {
    auto y = at::_grouped_mm(
        for_grouped_product(x), for_grouped_product(weight).transpose(1, 2), ends_of(counts));
    return bias.has_value() ? y.add_(bias->index_select(0, experts_of_rows(counts, x.size(0)))) : y;
  }
  auto y = at::empty_symint(shape, x.options());
  for (const auto& rows : rows_of_experts(counts, x.size(0))) {
    auto result = rows.of(y);
    const auto matrix = weight.select(0, rows.expert).t();
    if (bias.has_value()) {
      at::addmm_out(result, bias->select(0, rows.expert), rows.of(x), matrix);
    } else {
      at::mm_out(result, rows.of(x), matrix);
    }
  }
  return y;
}

at::Tensor grouped_weight_grad(const at::Tensor& grad_y,
                               const at::Tensor& x,
                               const at::Tensor& counts) {
  if (has_grouped_product(x, grad_y.t())) {
    auto grad =
        at::_grouped_mm(for_grouped_product(grad_y.t()), for_grouped_product(x), ends_of(counts));
    return grad.masked_fill_(counts.eq(0).view({-1, 1, 1}), 0);  // sums over no rows
  }
  auto grad = at::zeros({counts.size(0), grad_y.size(1), x.size(1)}, x.options());
  for (const auto& rows : rows_of_experts(counts, x.size(0))) {
    auto result = grad.select(0, rows.expert);
    at::mm_out(result, rows.of(grad_y).t(), rows.of(x));
  }
  return grad;
}

at::Tensor grouped_bias_grad(const at::Tensor& grad_y, const at::Tensor& counts) {
  if (has_grouped_product(grad_y, grad_y.t())) {
    const auto experts = at::arange(counts.size(0), counts.options()).unsqueeze(1);
    const auto is_of_expert = experts_of_rows(counts, grad_y.size(0)).unsqueeze(0).eq(experts);
    return at::mm(is_of_expert.to(grad_y.scalar_type()), grad_y);
  }
  auto grad = at::zeros({counts.size(0), grad_y.size(1)}, grad_y.options());
  for (const auto& rows : rows_of_experts(counts, grad_y.size(0))) {
    auto result = grad.select(0, rows.expert);
    at::sum_out(result, rows.of(grad_y), 0);
  }
  return grad;
}

class GroupedLinear : public torch::autograd::Function<GroupedLinear> {
 public:
  // Saves x only for the gradient of weight, and weight only for that of x.
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const at::Tensor& counts,
                            const OptionalTensor& bias) {
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor(),
                            x.requires_grad() ? weight : at::Tensor(),
                            counts});
    ctx->saved_data["has_bias"] = bias.has_value();
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::grouped_linear(x, weight, counts, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kGrouped);
    const auto& grad_y = grads[0];
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &counts = saved[2];
    // autograd::Function does not count absent optional inputs.
    const bool needs_bias = ctx->saved_data.at("has_bias").toBool() && ctx->needs_input_grad(3);
    variable_list result(4);
    if (ctx->needs_input_grad(0)) {
      result[0] = dispatch::grouped_linear(grad_y, weight.transpose(1, 2), counts, std::nullopt);
    }
    if (ctx->needs_input_grad(1)) {
      result[1] = dispatch::grouped_weight_grad(grad_y, x, counts);
    }
    if (needs_bias) {
      result[3] = dispatch::grouped_bias_grad(grad_y, counts);
    }
    return result;
  }
};

at::Tensor grouped_linear_autograd(const at::Tensor& x,
                                   const at::Tensor& weight,
                                   const at::Tensor& counts,
                                   const OptionalTensor& bias) {
  return GroupedLinear::apply(x, weight, counts, bias);
}

at::Tensor grouped_linear_meta(const at::Tensor& x,
                               const at::Tensor& weight,
                               const at::Tensor& counts,
                               const OptionalTensor& bias) {
  return at::empty_symint(grouped_linear_shape(x, weight, counts, bias), x.options());
}

at::Tensor grouped_weight_grad_meta(const at::Tensor& grad_y,
                                    const at::Tensor& x,
                                    const at::Tensor& counts) {
  return at::empty_symint({counts.sym_size(0), grad_y.sym_size(1), x.sym_size(1)}, x.options());
}

at::Tensor grouped_bias_grad_meta(const at::Tensor& grad_y, const at::Tensor& counts) {
  return at::empty_symint({counts.sym_size(0), grad_y.sym_size(1)}, grad_y.options());
}

void register_grouped_kernels(torch::Library& m) {
  m.impl("grouped_linear", TORCH_FN(grouped_linear));
  m.impl("_grouped_weight_grad", TORCH_FN(grouped_weight_grad));
  m.impl("_grouped_bias_grad", TORCH_FN(grouped_bias_grad));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_grouped_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_grouped_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("grouped_linear", TORCH_FN(grouped_linear_meta));
  m.impl("_grouped_weight_grad", TORCH_FN(grouped_weight_grad_meta));
  m.impl("_grouped_bias_grad", TORCH_FN(grouped_bias_grad_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("grouped_linear", TORCH_FN(grouped_linear_autograd));
}

}  // namespace weft::ops
