// Device kernels of the vocabulary-parallel cross-entropy and its gradients: from this rank's
// logits, or from hidden states and this rank's rows of the output matrix.
//
// Logits that must be computed, or copied because their rows are not contiguous, are processed in
// chunks of tokens: besides its inputs and results, a rank stores the logits of one chunk. One
// all-gather exchanges four numbers per token. The inputs and two numbers per token are saved; the
// backward recomputes the rest.

#include "autograd_support.h"
#include "cross_entropy_math.h"
#include "group_collectives.h"
#include "row_products.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

constexpr std::string_view kLoss = "weft::vocab_parallel_cross_entropy";
constexpr std::string_view kLinearLoss = "weft::vocab_parallel_linear_cross_entropy";

// Bytes of a chunk of copied logits, which should stay in the caches.
constexpr std::int64_t kCopiedChunkBytes = std::int64_t{4} << 20;

using LossesAndNormalizers = std::tuple<at::Tensor, at::Tensor>;

// Raises IndexError for CPU targets outside [0, vocab_size) other than ignore_index. Checks nothing
// without vocab_size, or on CUDA, where reading the targets would synchronize with the device.
void check_targets(std::string_view op,
                   const at::Tensor& target,
                   std::optional<std::int64_t> vocab_size,
                   std::int64_t ignore_index) {
  if (!vocab_size.has_value() || !target.is_cpu()) {
    return;
  }
  const auto counted = target.masked_select(target.ne(ignore_index));
  if (counted.numel() == 0) {
    return;
  }
  const auto [lowest, highest] = counted.aminmax();
  TORCH_CHECK_INDEX(lowest.item().toLong() >= 0 && highest.item().toLong() < *vocab_size,
                    op,
                    ": got targets from ",
                    lowest.item().toLong(),
                    " to ",
                    highest.item().toLong(),
                    "; pass classes from 0 to vocab_size - 1 = ",
                    *vocab_size - 1,
                    ", or ignore_index ",
                    ignore_index,
                    ".");
}

// Calls visit(first, size) for each chunk of tokens.
template <typename Visit>
void for_each_chunk(std::int64_t num_tokens, std::int64_t chunk, const Visit& visit) {
  for (std::int64_t first = 0; first < num_tokens; first += chunk) {
    visit(first, std::min(chunk, num_tokens - first));
  }
}

// Returns the chunk size in tokens for a matrix of logits: all tokens, unless the kernels would
// copy the logits because their rows are not contiguous.
std::int64_t chunk_tokens(const at::Tensor& logits) {
  const bool has_contiguous_rows = logits.size(1) <= 1 || logits.stride(1) == 1;
  return has_contiguous_rows
             ? std::max<std::int64_t>(1, logits.size(0))
             : tokens_per_chunk(logits.size(1), logits.scalar_type(), kCopiedChunkBytes);
}

// Returns the losses and normalizers of all tokens. `logits_of(first, size)` returns the logits of
// the tokens [first, first + size), `chunk` is the chunk size in tokens.
template <typename LogitsOf>
LossesAndNormalizers losses_of(std::string_view op,
                               const at::Tensor& target,
                               const ProcessGroupPtr& group,
                               const at::TensorOptions& statistics_options,
                               std::int64_t chunk,
                               const LocalLossOptions& options,
                               const LogitsOf& logits_of) {
  const auto num_tokens = target.numel();
  const auto targets = target.reshape({-1});
  at::Tensor statistics;
  if (num_tokens <= chunk) {
    statistics = local_statistics(logits_of(0, num_tokens), targets, options);
  } else {
    statistics = at::empty({num_tokens, 4}, statistics_options);
    for_each_chunk(num_tokens, chunk, [&](std::int64_t first, std::int64_t size) {
      statistics.narrow(0, first, size)
          .copy_(local_statistics(logits_of(first, size), targets.narrow(0, first, size), options));
    });
  }
  const auto num_ranks = rank_in(group).num_ranks;
  if (group) {
    statistics = all_gather(op, statistics, 0, num_tokens * num_ranks, group);
  }
  const auto [losses, normalizers] =
      combine_statistics(statistics.view({num_ranks, num_tokens, 4}), targets, options);
  return {losses.view(target.sizes()), normalizers};
}

LossesAndNormalizers cross_entropy(const at::Tensor& logits,
                                   const at::Tensor& target,
                                   std::int64_t vocab_start,
                                   std::string_view group_name,
                                   std::optional<std::int64_t> vocab_size,
                                   std::int64_t ignore_index,
                                   double label_smoothing) {
  const auto group = resolve_group(kLoss, std::string(group_name));
  check_targets(kLoss, target, vocab_size, ignore_index);
  const auto num_classes = classes_of(logits.size(-1), vocab_size, rank_in(group));
  const auto matrix = as_matrix(logits);
  return losses_of(
      kLoss,
      target,
      group,
      logits.options().dtype(loss_dtype(logits)),
      chunk_tokens(matrix),
      {vocab_start, num_classes, ignore_index, label_smoothing},
      [&](std::int64_t first, std::int64_t size) { return matrix.narrow(0, first, size); });
}

at::Tensor cross_entropy_backward(const at::Tensor& grad,
                                  const at::Tensor& logits,
                                  const at::Tensor& target,
                                  const at::Tensor& normalizers,
                                  std::int64_t vocab_start,
                                  std::int64_t num_classes,
                                  std::int64_t ignore_index,
                                  double label_smoothing) {
  const LocalLossOptions options{vocab_start, num_classes, ignore_index, label_smoothing};
  const auto matrix = as_matrix(logits);
  const auto grads = grad.reshape({-1});
  const auto targets = target.reshape({-1});
  auto result = at::empty(matrix.sizes(), logits.options());
  for_each_chunk(matrix.size(0), chunk_tokens(matrix), [&](std::int64_t first, std::int64_t size) {
    write_gradient(result.narrow(0, first, size),
                   grads.narrow(0, first, size),
                   matrix.narrow(0, first, size),
                   targets.narrow(0, first, size),
                   normalizers.narrow(1, first, size),
                   options);
  });
  return result.view(logits.sizes());
}

LossesAndNormalizers linear_cross_entropy(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const at::Tensor& target,
                                          std::int64_t vocab_start,
                                          std::string_view group_name,
                                          std::optional<std::int64_t> vocab_size,
                                          std::int64_t ignore_index,
                                          double label_smoothing) {
  const auto group = resolve_group(kLinearLoss, std::string(group_name));
  check_targets(kLinearLoss, target, vocab_size, ignore_index);
  const auto num_classes = classes_of(weight.size(0), vocab_size, rank_in(group));
  const auto tokens = as_matrix(x);
  return losses_of(kLinearLoss,
                   target,
                   group,
                   x.options().dtype(loss_dtype(x)),
                   tokens_per_product_chunk(x.device(), weight.sizes(), x.scalar_type()),
                   {vocab_start, num_classes, ignore_index, label_smoothing},
                   [&](std::int64_t first, std::int64_t size) {
                     return at::mm(tokens.narrow(0, first, size), weight.t());
                   });
}

// Returns the contribution of this rank's classes to grad_x, which the caller sums over the group,
// and grad_weight; each has shape [0] if not wanted.
std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_backward(const at::Tensor& grad,
                                                                 const at::Tensor& x,
                                                                 const at::Tensor& weight,
                                                                 const at::Tensor& target,
                                                                 const at::Tensor& normalizers,
                                                                 std::int64_t vocab_start,
                                                                 std::int64_t num_classes,
                                                                 std::int64_t ignore_index,
                                                                 double label_smoothing,
                                                                 bool wants_x,
                                                                 bool wants_weight) {
  const LocalLossOptions options{vocab_start, num_classes, ignore_index, label_smoothing};
  const auto tokens = as_matrix(x);
  const auto grads = grad.reshape({-1});
  const auto targets = target.reshape({-1});
  auto grad_x = wants_x ? at::empty(tokens.sizes(), x.options()) : at::empty({0}, x.options());
  WeightGradSum weight_sum(weight);
  const auto chunk = tokens_per_product_chunk(x.device(), weight.sizes(), x.scalar_type());
  for_each_chunk(tokens.size(0), chunk, [&](std::int64_t first, std::int64_t size) {
    const auto x_chunk = tokens.narrow(0, first, size);
    const auto logits = at::mm(x_chunk, weight.t());
    const auto& grad_logits = logits;  // written in place
    write_gradient(grad_logits,
                   grads.narrow(0, first, size),
                   logits,
                   targets.narrow(0, first, size),
                   normalizers.narrow(1, first, size),
                   options);
    if (wants_x) {
      auto grad_x_chunk = grad_x.narrow(0, first, size);
      at::mm_out(grad_x_chunk, grad_logits, weight);
    }
    if (wants_weight) {
      weight_sum.add(grad_logits, x_chunk);
    }
  });
  return {wants_x ? grad_x.view(x.sizes()) : grad_x,
          wants_weight ? weight_sum.get() : at::empty({0}, weight.options())};
}

void register_local_loss_kernels(torch::Library& m) {
  m.impl("_vocab_cross_entropy", TORCH_FN(cross_entropy));
  m.impl("_vocab_cross_entropy_backward", TORCH_FN(cross_entropy_backward));
  m.impl("_linear_cross_entropy", TORCH_FN(linear_cross_entropy));
  m.impl("_linear_cross_entropy_backward", TORCH_FN(linear_cross_entropy_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_local_loss_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_local_loss_kernels(m); }

}  // namespace weft::ops
