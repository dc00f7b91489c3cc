#include "cross_entropy_math.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <limits>

namespace weft::ops {

namespace {

// Which entry is a token's target, and whether it is this rank's: then within [0, v).
struct OwnTarget {
  at::Tensor entry;  // [tokens, 1], 0 where it is another's
  at::Tensor is_own;
};

OwnTarget own_target(const at::Tensor& target,
                     std::int64_t num_entries,
                     const LocalLossOptions& options) {
  auto entry = target.to(at::kLong).sub(options.vocab_start);
  auto is_own =
      entry.ge(0).logical_and_(entry.lt(num_entries)).logical_and_(target.ne(options.ignore_index));
  return {entry.mul_(is_own).unsqueeze(1), is_own};
}

}  // namespace

at::ScalarType loss_dtype(const at::Tensor& logits) {
  return at::toOpMathType(logits.scalar_type());
}

std::int64_t tokens_per_chunk(std::int64_t num_entries,
                              at::ScalarType dtype,
                              std::int64_t num_bytes) {
  const auto row = num_entries * static_cast<std::int64_t>(c10::elementSize(dtype));
  return std::max<std::int64_t>(1, num_bytes / std::max<std::int64_t>(1, row));
}

at::Tensor local_statistics(const at::Tensor& logits,
                            const at::Tensor& target,
                            const LocalLossOptions& options) {
  auto result = at::empty({logits.size(0), 4}, logits.options());
  result.select(1, 0).fill_(-std::numeric_limits<double>::infinity());
  result.narrow(1, 1, 3).zero_();
  if (logits.numel() == 0) {
    return result;
  }
  const auto [entry, is_own] = own_target(target, logits.size(1), options);
  result.select(1, 2).copy_(
      logits.gather(1, entry).squeeze(1).masked_fill_(is_own.logical_not(), 0));
  if (options.label_smoothing != 0) {
    result.select(1, 3).copy_(logits.sum(1));
  }
  const auto largest = logits.amax(1);
  result.select(1, 0).copy_(largest);
  // Where all are masked out, their sum is 0 and not that of nan.
  const auto shift = largest.masked_fill(largest.eq(-std::numeric_limits<double>::infinity()), 0);
  result.select(1, 1).copy_(logits.sub_(shift.unsqueeze(1)).exp_().sum(1));
  return result;
}

TokenLosses combine_statistics(const at::Tensor& statistics,
                               const at::Tensor& target,
                               const LocalLossOptions& options) {
  const auto largest = statistics.select(2, 0);
  const auto of_all = largest.amax(0);
  const auto log_sum = statistics.select(2, 1).mul(largest.sub(of_all).exp_()).sum(0).log_();
  // Differences first: the logits may be large where the loss is not.
  auto losses = of_all.sub(statistics.select(2, 2).sum(0)).add_(log_sum);
  if (const double smoothing = options.label_smoothing; smoothing != 0) {
    const auto mean = statistics.select(2, 3).sum(0).div_(static_cast<double>(options.num_classes));
    losses.mul_(1 - smoothing).add_(of_all.sub(mean).add_(log_sum), smoothing);
  }
  losses.masked_fill_(target.eq(options.ignore_index), 0);
  return {losses, at::stack({of_all, log_sum})};
}

void turn_into_gradient(const at::Tensor& logits,
                        const at::Tensor& grad,
                        const at::Tensor& target,
                        const at::Tensor& normalizers,
                        const LocalLossOptions& options) {
  if (logits.numel() == 0) {
    return;
  }
  const double smoothing = options.label_smoothing;
  const auto [entry, is_own] = own_target(target, logits.size(1), options);
  logits.sub_(normalizers[0].unsqueeze(1)).sub_(normalizers[1].unsqueeze(1)).exp_();
  if (smoothing != 0) {
    logits.sub_(smoothing / static_cast<double>(options.num_classes));
  }
  const auto share = is_own.to(logits.scalar_type()).mul_(smoothing - 1).unsqueeze(1);
  logits.scatter_add_(1, entry, share);
  const auto scale = grad.to(logits.scalar_type()).masked_fill(target.eq(options.ignore_index), 0);
  logits.mul_(scale.unsqueeze(1));
}

}  // namespace weft::ops
