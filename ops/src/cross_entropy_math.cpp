#include "cross_entropy_math.h"

#include "dispatch.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>

namespace weft::ops {

at::ScalarType loss_dtype(const at::Tensor& logits) {
  return at::toOpMathType(logits.scalar_type());
}

std::int64_t tokens_per_chunk(std::int64_t num_entries,
                              at::ScalarType dtype,
                              std::int64_t num_bytes) {
  const auto row = num_entries * static_cast<std::int64_t>(c10::elementSize(dtype));
  return std::max<std::int64_t>(1, num_bytes / std::max<std::int64_t>(1, row));
}

std::int64_t tokens_per_product_chunk(const c10::Device& device,
                                      at::IntArrayRef weight_sizes,
                                      at::ScalarType dtype) {
  constexpr std::int64_t kMinBytes = std::int64_t{32} << 20;
  constexpr std::int64_t kMaxCudaTokens = 2048;
  auto num_bytes = kMinBytes;
  if (device.is_cuda()) {
    const auto tokens = std::min(kMaxCudaTokens, weight_sizes[1]);
    const auto row_bytes = weight_sizes[0] * static_cast<std::int64_t>(c10::elementSize(dtype));
    num_bytes = std::max(num_bytes, tokens * row_bytes);
  }
  return tokens_per_chunk(weight_sizes[0], dtype, num_bytes);
}

at::Tensor local_statistics(const at::Tensor& logits,
                            const at::Tensor& target,
                            const LocalLossOptions& options) {
  return dispatch::cross_entropy_statistics(
      logits, target, options.vocab_start, options.ignore_index, options.label_smoothing != 0);
}

namespace {

// The columns of the statistics, see local_statistics().
constexpr std::int64_t kLargest = 0, kSumOfExp = 1, kTargetLogit = 2, kSumOfLogits = 3;

}  // namespace

TokenLosses combine_statistics(const at::Tensor& statistics,
                               const at::Tensor& target,
                               const LocalLossOptions& options) {
  const auto largest = statistics.select(2, kLargest);
  const auto largest_of_all = largest.amax(0);
  const auto log_sum =
      statistics.select(2, kSumOfExp).mul(largest.sub(largest_of_all).exp_()).sum(0).log_();
  // Subtract first: logits may be large while the loss is small.
  auto losses = largest_of_all.sub(statistics.select(2, kTargetLogit).sum(0)).add_(log_sum);
  if (const double smoothing = options.label_smoothing; smoothing != 0) {
    const auto mean =
        statistics.select(2, kSumOfLogits).sum(0).div_(static_cast<double>(options.num_classes));
    losses.mul_(1 - smoothing).add_(largest_of_all.sub(mean).add_(log_sum), smoothing);
  }
  losses.masked_fill_(target.eq(options.ignore_index), 0);
  return {losses, at::stack({largest_of_all, log_sum})};
}

void write_gradient(const at::Tensor& grad_logits,
                    const at::Tensor& grad_losses,
                    const at::Tensor& logits,
                    const at::Tensor& target,
                    const at::Tensor& normalizers,
                    const LocalLossOptions& options) {
  dispatch::cross_entropy_gradient(grad_logits,
                                   grad_losses,
                                   logits,
                                   target,
                                   normalizers,
                                   options.vocab_start,
                                   options.num_classes,
                                   options.ignore_index,
                                   options.label_smoothing);
}

namespace {

at::Tensor statistics_meta(const at::Tensor& logits,
                           const at::Tensor& /*target*/,
                           std::int64_t /*vocab_start*/,
                           std::int64_t /*ignore_index*/,
                           bool /*wants_sum*/) {
  return at::empty_symint({logits.sym_size(0), 4}, logits.options().dtype(loss_dtype(logits)));
}

void gradient_meta(const at::Tensor& /*grad_logits*/,
                   const at::Tensor& /*grad_losses*/,
                   const at::Tensor& /*logits*/,
                   const at::Tensor& /*target*/,
                   const at::Tensor& /*normalizers*/,
                   std::int64_t /*vocab_start*/,
                   std::int64_t /*num_classes*/,
                   std::int64_t /*ignore_index*/,
                   double /*label_smoothing*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("_cross_entropy_statistics", TORCH_FN(statistics_meta));
  m.impl("_cross_entropy_gradient", TORCH_FN(gradient_meta));
}

}  // namespace weft::ops
