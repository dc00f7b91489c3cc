#pragma once

#include "weft/strategy/mesh.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::strategy::detail {

// Returns at most `max_choices` variants of `axes` whose sizes have the product `world_size`,
// ordered by the number of sizes that change, then by the sum of the changes. REQUIRES: at least
// one axis, 1 <= world_size <= Mesh::kMaxSize.
std::vector<std::vector<Axis>> nearest_axes(const std::vector<Axis>& axes,
                                            int64_t world_size,
                                            size_t max_choices);

}  // namespace weft::strategy::detail
