#include "mesh_fit.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

namespace weft::strategy::detail {

namespace {

// The most factorizations that are searched: enough for every world size up to 10,000 over three
// axes. The search tries the requested sizes first, so that it finds near ones before it stops.
constexpr size_t kMaxCandidates = 10'000;

using Sizes = std::vector<int64_t>;

Sizes divisors(int64_t number) {
  Sizes small;
  Sizes large;
  for (int64_t i = 1; i * i <= number; ++i) {
    if (number % i == 0) {
      small.push_back(i);
      if (i != number / i) {
        large.push_back(number / i);
      }
    }
  }
  small.insert(small.end(), large.rbegin(), large.rend());
  return small;
}

// Appends to `found`, up to kMaxCandidates, `chosen` followed by the sizes of the remaining axes,
// for every factorization of `rest` into these sizes. Each axis tries its requested size first.
// `sizes` are the divisors of the world size.
void extend(const std::vector<Axis>& axes,
            const Sizes& sizes,
            int64_t rest,
            Sizes& chosen,
            std::vector<Sizes>& found) {
  if (found.size() >= kMaxCandidates) {
    return;
  }
  const int64_t requested = axes[chosen.size()].size;
  if (chosen.size() + 1 == axes.size()) {
    found.push_back(chosen);
    found.back().push_back(rest);
    return;
  }
  const auto choose = [&](int64_t size) {
    chosen.push_back(size);
    extend(axes, sizes, rest / size, chosen, found);
    chosen.pop_back();
  };
  if (rest % requested == 0) {
    choose(requested);
  }
  for (const int64_t size : sizes) {
    if (size != requested && rest % size == 0) {
      choose(size);
    }
  }
}

// Smaller is nearer: the number of changed sizes, the sum of changes, then the sizes themselves.
using Distance = std::tuple<size_t, int64_t, Sizes>;

Distance distance(const std::vector<Axis>& axes, const Sizes& sizes) {
  size_t num_changed = 0;
  int64_t change = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    num_changed += axes[i].size != sizes[i] ? 1U : 0U;
    change += std::abs(axes[i].size - sizes[i]);
  }
  return {num_changed, change, sizes};
}

}  // namespace

std::vector<std::vector<Axis>> nearest_axes(const std::vector<Axis>& axes,
                                            int64_t world_size,
                                            size_t max_choices) {
  std::vector<Sizes> found;
  Sizes chosen;
  extend(axes, divisors(world_size), world_size, chosen, found);

  std::vector<Distance> ranked;
  ranked.reserve(found.size());
  for (const Sizes& sizes : found) {
    ranked.push_back(distance(axes, sizes));
  }
  std::sort(ranked.begin(), ranked.end());
  ranked.resize(std::min(ranked.size(), max_choices));

  std::vector<std::vector<Axis>> result;
  for (const auto& [num_changed, change, sizes] : ranked) {
    result.push_back(axes);
    for (size_t i = 0; i < sizes.size(); ++i) {
      result.back()[i].size = sizes[i];
    }
  }
  return result;
}

}  // namespace weft::strategy::detail
