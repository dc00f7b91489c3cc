// The ranks' inputs to a collective, and its expected result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::collectives::testing {

using Values = std::vector<float>;

// Small integers, so that the sum does not depend on the order of the additions.
inline Values values_of(int rank, int64_t size) {
  Values values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((static_cast<size_t>(rank) + 1) * (i % 97 + 1));
  }
  return values;
}

inline Values sum_over(int num_ranks, int64_t size) {
  Values total(static_cast<size_t>(size), 0.F);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Values values = values_of(rank, size);
    for (size_t i = 0; i < total.size(); ++i) total[i] += values[i];
  }
  return total;
}

}  // namespace weft::collectives::testing
