#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// The statistics and the gradient of one row of logits in plain double precision.
namespace weft::kernels::reference {

struct Statistics {
  double largest;
  double sum;  // of exp(logit - largest)
  double target_logit;
  double total;  // sum of the logits
};

// `column`: the column of the target, or -1 if the target is ignored or belongs to another shard.
inline Statistics statistics(const std::vector<double>& logits, int64_t column) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Statistics result{-kInfinity, 0, 0, 0};
  for (const double logit : logits) {
    if (std::isnan(logit) || std::isnan(result.largest)) {
      result.largest = std::numeric_limits<double>::quiet_NaN();
    } else {
      result.largest = std::max(result.largest, logit);
    }
    result.total += logit;
  }
  const double shift = result.largest == -kInfinity ? 0 : result.largest;
  for (const double logit : logits) result.sum += std::exp(logit - shift);
  if (column >= 0) result.target_logit = logits[static_cast<std::size_t>(column)];
  return result;
}

// The normalizers of one row of the full vocabulary.
struct Normalizers {
  double largest;
  double log_sum;  // of exp(logit - largest)
};

inline double probability(double logit, Normalizers normalizers) {
  return std::exp(logit - normalizers.largest - normalizers.log_sum);
}

// The gradient of a logit of probability `p`, in a row that is not ignored.
inline double gradient(
    double grad, double p, bool is_target, double smoothing, double num_classes) {
  return grad * (p - smoothing / num_classes - (is_target ? 1 - smoothing : 0));
}

}  // namespace weft::kernels::reference
