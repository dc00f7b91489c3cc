// What ranks bring to a collective, and what it should give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::collectives::testing {

using Values = std::vector<float>;

// Rank r's element i: small integers, so that every order of adding gives the same.
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
