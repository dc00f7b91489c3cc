// vocab_parallel_cross_entropy and vocab_parallel_linear_cross_entropy: the public operators, their
// autograd formulas and the Meta kernels. vocab_parallel_cross_entropy.cpp has the device kernels.

#include "autograd_support.h"
#include "cross_entropy_math.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

constexpr std::string_view kLossOp = "weft::vocab_parallel_cross_entropy";
constexpr std::string_view kLinearLossOp = "weft::vocab_parallel_linear_cross_entropy";

using LossesAndNormalizers = std::tuple<at::Tensor, at::Tensor>;

// The mean is over the tokens that are not ignored, as in torch.
at::Tensor reduced(const at::Tensor& losses,
                   const at::Tensor& target,
                   std::int64_t ignore_index,
                   std::string_view reduction) {
  if (reduction == "none") {
    return losses;
  }
  auto sum = losses.sum();
  return reduction == "sum" ? sum : sum.div(target.ne(ignore_index).sum());
}

// The arguments that both operators have, and the number of classes of all ranks together. The
// backward has no vocab_size: it needs only num_classes.
struct LossCall {
  std::int64_t vocab_start;
  std::string group_name;
  std::optional<std::int64_t> vocab_size;
  std::int64_t num_classes;
  std::int64_t ignore_index;
  double label_smoothing;
};

void save(AutogradContext* ctx, const LossCall& call) {
  ctx->saved_data["vocab_start"] = call.vocab_start;
  ctx->saved_data["group_name"] = call.group_name;
  ctx->saved_data["num_classes"] = call.num_classes;
  ctx->saved_data["ignore_index"] = call.ignore_index;
  ctx->saved_data["label_smoothing"] = call.label_smoothing;
}
LossCall saved_call(AutogradContext* ctx) {
  return {ctx->saved_data.at("vocab_start").toInt(),
          ctx->saved_data.at("group_name").toStringRef(),
          std::nullopt,
          ctx->saved_data.at("num_classes").toInt(),
          ctx->saved_data.at("ignore_index").toInt(),
          ctx->saved_data.at("label_smoothing").toDouble()};
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& logits,
                            const at::Tensor& target,
                            const LossCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [losses, normalizers] = dispatch::vocab_cross_entropy(logits,
                                                                     target,
                                                                     call.vocab_start,
                                                                     call.group_name,
                                                                     call.vocab_size,
                                                                     call.ignore_index,
                                                                     call.label_smoothing);
    ctx->save_for_backward({logits, target, normalizers});
    save(ctx, call);
    return losses;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kLossOp);
    const auto saved = ctx->get_saved_variables();
    const auto call = saved_call(ctx);
    return {dispatch::vocab_cross_entropy_backward(grads[0],
                                                   saved[0],
                                                   saved[1],
                                                   saved[2],
                                                   call.vocab_start,
                                                   call.num_classes,
                                                   call.ignore_index,
                                                   call.label_smoothing),
            at::Tensor(),
            at::Tensor()};
  }
};

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const at::Tensor& target,
                            const LossCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [losses, normalizers] = dispatch::linear_cross_entropy(x,
                                                                      weight,
                                                                      target,
                                                                      call.vocab_start,
                                                                      call.group_name,
                                                                      call.vocab_size,
                                                                      call.ignore_index,
                                                                      call.label_smoothing);
    ctx->save_for_backward({x, weight, target, normalizers});
    save(ctx, call);
    return losses;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kLinearLossOp);
    const auto saved = ctx->get_saved_variables();
    const auto call = saved_call(ctx);
    const bool wants_x = ctx->needs_input_grad(0);
    const bool wants_weight = ctx->needs_input_grad(1);
    auto [grad_x, grad_weight] = dispatch::linear_cross_entropy_backward(grads[0],
                                                                         saved[0],
                                                                         saved[1],
                                                                         saved[2],
                                                                         saved[3],
                                                                         call.vocab_start,
                                                                         call.num_classes,
                                                                         call.ignore_index,
                                                                         call.label_smoothing,
                                                                         wants_x,
                                                                         wants_weight);
    if (wants_x && is_traced(grad_x)) {
      grad_x = dispatch::reduce_from_group(grad_x, call.group_name);
    } else if (wants_x) {
      all_reduce_(kLinearLossOp, grad_x, resolve_group(kLinearLossOp, call.group_name));
    }
    return {wants_x ? grad_x : at::Tensor(),
            wants_weight ? grad_weight : at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

LossCall call_of(std::string_view op,
                 std::int64_t num_entries,
                 std::int64_t vocab_start,
                 std::string_view group_name,
                 std::optional<std::int64_t> vocab_size,
                 std::int64_t ignore_index,
                 double label_smoothing) {
  const auto num_classes = classes_of(num_entries, vocab_size, rank_in(op, group_name));
  return {
      vocab_start, std::string(group_name), vocab_size, num_classes, ignore_index, label_smoothing};
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                        const at::Tensor& target,
                                        std::int64_t vocab_start,
                                        std::string_view group_name,
                                        std::optional<std::int64_t> vocab_size,
                                        std::int64_t ignore_index,
                                        double label_smoothing,
                                        std::string_view reduction) {
  cross_entropy_shape(kLossOp, logits, target, vocab_start, label_smoothing, reduction);
  check_classes(kLossOp, vocab_start, logits.sym_size(-1), vocab_size);
  const auto losses = std::get<0>(dispatch::vocab_cross_entropy(
      logits, target, vocab_start, group_name, vocab_size, ignore_index, label_smoothing));
  return reduced(losses, target, ignore_index, reduction);
}

at::Tensor vocab_parallel_cross_entropy_autograd(const at::Tensor& logits,
                                                 const at::Tensor& target,
                                                 std::int64_t vocab_start,
                                                 std::string_view group_name,
                                                 std::optional<std::int64_t> vocab_size,
                                                 std::int64_t ignore_index,
                                                 double label_smoothing,
                                                 std::string_view reduction) {
  cross_entropy_shape(kLossOp, logits, target, vocab_start, label_smoothing, reduction);
  check_classes(kLossOp, vocab_start, logits.sym_size(-1), vocab_size);
  const auto call = call_of(kLossOp,
                            logits.sym_size(-1).guard_int(__FILE__, __LINE__),
                            vocab_start,
                            group_name,
                            vocab_size,
                            ignore_index,
                            label_smoothing);
  return reduced(CrossEntropy::apply(logits, target, call), target, ignore_index, reduction);
}

at::Tensor vocab_parallel_linear_cross_entropy(const at::Tensor& x,
                                               const at::Tensor& weight,
                                               const at::Tensor& target,
                                               std::int64_t vocab_start,
                                               std::string_view group_name,
                                               std::optional<std::int64_t> vocab_size,
                                               std::int64_t ignore_index,
                                               double label_smoothing,
                                               std::string_view reduction) {
  linear_cross_entropy_shape(x, weight, target, vocab_start, label_smoothing, reduction);
  check_classes(kLinearLossOp, vocab_start, weight.sym_size(0), vocab_size);
  const auto losses = std::get<0>(dispatch::linear_cross_entropy(
      x, weight, target, vocab_start, group_name, vocab_size, ignore_index, label_smoothing));
  return reduced(losses, target, ignore_index, reduction);
}

at::Tensor vocab_parallel_linear_cross_entropy_autograd(const at::Tensor& x,
                                                        const at::Tensor& weight,
                                                        const at::Tensor& target,
                                                        std::int64_t vocab_start,
                                                        std::string_view group_name,
                                                        std::optional<std::int64_t> vocab_size,
                                                        std::int64_t ignore_index,
                                                        double label_smoothing,
                                                        std::string_view reduction) {
  linear_cross_entropy_shape(x, weight, target, vocab_start, label_smoothing, reduction);
  check_classes(kLinearLossOp, vocab_start, weight.sym_size(0), vocab_size);
  const auto call = call_of(kLinearLossOp,
                            weight.sym_size(0).guard_int(__FILE__, __LINE__),
                            vocab_start,
                            group_name,
                            vocab_size,
                            ignore_index,
                            label_smoothing);
  return reduced(
      LinearCrossEntropy::apply(x, weight, target, call), target, ignore_index, reduction);
}

// Returns uninitialized losses and normalizers. `logits`: any tensor of the logits' dtype.
LossesAndNormalizers losses_meta(const at::Tensor& target, const at::Tensor& logits) {
  const auto options = logits.options().dtype(loss_dtype(logits));
  return {at::empty_symint(target.sym_sizes(), options),
          at::empty_symint({2, target.sym_numel()}, options)};
}

LossesAndNormalizers cross_entropy_meta(const at::Tensor& logits,
                                        const at::Tensor& target,
                                        std::int64_t /*vocab_start*/,
                                        std::string_view /*group_name*/,
                                        std::optional<std::int64_t> /*vocab_size*/,
                                        std::int64_t /*ignore_index*/,
                                        double /*label_smoothing*/) {
  return losses_meta(target, logits);
}

LossesAndNormalizers linear_cross_entropy_meta(const at::Tensor& x,
                                               const at::Tensor& /*weight*/,
                                               const at::Tensor& target,
                                               std::int64_t /*vocab_start*/,
                                               std::string_view /*group_name*/,
                                               std::optional<std::int64_t> /*vocab_size*/,
                                               std::int64_t /*ignore_index*/,
                                               double /*label_smoothing*/) {
  return losses_meta(target, x);
}

at::Tensor cross_entropy_backward_meta(const at::Tensor& /*grad*/,
                                       const at::Tensor& logits,
                                       const at::Tensor& /*target*/,
                                       const at::Tensor& /*normalizers*/,
                                       std::int64_t /*vocab_start*/,
                                       std::int64_t /*num_classes*/,
                                       std::int64_t /*ignore_index*/,
                                       double /*label_smoothing*/) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_backward_meta(
    const at::Tensor& /*grad*/,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& /*target*/,
    const at::Tensor& /*normalizers*/,
    std::int64_t /*vocab_start*/,
    std::int64_t /*num_classes*/,
    std::int64_t /*ignore_index*/,
    double /*label_smoothing*/,
    bool wants_x,
    bool wants_weight) {
  const auto like = [](const at::Tensor& tensor, bool is_wanted) {
    return is_wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                     : at::empty({0}, tensor.options());
  };
  return {like(x, wants_x), like(weight, wants_weight)};
}

void register_loss_kernels(torch::Library& m) {
  m.impl("vocab_parallel_cross_entropy", TORCH_FN(vocab_parallel_cross_entropy));
  m.impl("vocab_parallel_linear_cross_entropy", TORCH_FN(vocab_parallel_linear_cross_entropy));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_loss_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_loss_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  register_loss_kernels(m);
  m.impl("_vocab_cross_entropy", TORCH_FN(cross_entropy_meta));
  m.impl("_vocab_cross_entropy_backward", TORCH_FN(cross_entropy_backward_meta));
  m.impl("_linear_cross_entropy", TORCH_FN(linear_cross_entropy_meta));
  m.impl("_linear_cross_entropy_backward", TORCH_FN(linear_cross_entropy_backward_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("vocab_parallel_cross_entropy", TORCH_FN(vocab_parallel_cross_entropy_autograd));
  m.impl("vocab_parallel_linear_cross_entropy",
         TORCH_FN(vocab_parallel_linear_cross_entropy_autograd));
}

}  // namespace weft::ops
