#include "weft/strategy/pipeline/micro_batches.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>

namespace weft::strategy {

namespace {

[[noreturn]] void throw_invalid(const std::string& text) {
  throw std::invalid_argument("micro-batches: " + text);
}

}  // namespace

std::vector<int64_t> deal_samples(int64_t batch_size, std::span<const double> shares) {
  const auto count = static_cast<int64_t>(shares.size());
  if (count < 1 || batch_size < count) {
    throw_invalid(std::to_string(count) + " micro-batches of a batch of " +
                  std::to_string(batch_size) + "; pass 1 to as many as there are samples");
  }
  double total = 0;
  for (const double share : shares) {
    if (!std::isfinite(share) || share <= 0) {
      throw_invalid("a micro-batch's share is " + std::to_string(share) + "; pass numbers above 0");
    }
    total += share;
  }
  std::vector<int64_t> sizes;
  std::vector<double> wanted;
  int64_t remaining = batch_size;
  for (const double share : shares) {
    wanted.push_back(static_cast<double>(batch_size) * (share / total));
    sizes.push_back(std::max<int64_t>(1, static_cast<int64_t>(wanted.back())));
    remaining -= sizes.back();
  }
  // Add the remaining samples, one by one, to the size that is furthest below its share; remove an
  // excess, one by one, from the size that is furthest above its share.
  for (; remaining != 0; remaining -= remaining > 0 ? 1 : -1) {
    size_t chosen = 0;
    double most = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < sizes.size(); ++i) {
      const double lack = wanted[i] - static_cast<double>(sizes[i]);
      const double key = remaining > 0  ? lack
                         : sizes[i] > 1 ? -lack
                                        : -std::numeric_limits<double>::infinity();
      // The tolerance chooses the first size among those that are equal up to rounding.
      if (key > most + 1e-9) {
        chosen = i;
        most = key;
      }
    }
    sizes[chosen] += remaining > 0 ? 1 : -1;
  }
  return sizes;
}

std::vector<std::vector<int64_t>> tapered_sizes(int64_t batch_size,
                                                int64_t count,
                                                int64_t max_tapered) {
  constexpr int64_t kMaxTapered = 4;
  constexpr auto kSmallest = std::to_array<double>({1.0 / 4, 1.0 / 3, 1.0 / 2, 2.0 / 3, 3.0 / 4});
  struct Ends {
    bool first;
    bool last;
  };
  const auto even = deal_samples(batch_size, std::vector<double>(static_cast<size_t>(count), 1.0));
  std::set<std::vector<int64_t>> result;
  const int64_t most = std::min({max_tapered, kMaxTapered, (count - 1) / 2});
  for (int64_t num_tapered = 1; num_tapered <= most; num_tapered *= 2) {
    for (const double smallest : kSmallest) {
      for (const auto [first, last] : {Ends{true, true}, Ends{true, false}, Ends{false, true}}) {
        std::vector<double> shares(static_cast<size_t>(count), 1.0);
        for (int64_t i = 0; i < num_tapered; ++i) {
          const double share =
              smallest + (1 - smallest) * static_cast<double>(i) / static_cast<double>(num_tapered);
          if (first) {
            shares[static_cast<size_t>(i)] = share;
          }
          if (last) {
            shares[static_cast<size_t>(count - 1 - i)] = share;
          }
        }
        result.insert(deal_samples(batch_size, shares));
      }
    }
  }
  result.erase(even);
  return {result.begin(), result.end()};
}

}  // namespace weft::strategy
