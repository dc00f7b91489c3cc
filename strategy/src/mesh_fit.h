#pragma once

#include "weft/strategy/mesh.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::strategy::detail {

// Returns the given axes with other sizes, whose product is `world_size`: at most `max_choices`
// alternatives, ordered by how many sizes change, then by how much they change in all.
// REQUIRES: at least one axis, 1 <= world_size <= Mesh::kMaxSize.
std::vector<std::vector<Axis>> nearest_axes(const std::vector<Axis>& axes,
                                            int64_t world_size,
                                            size_t max_choices);

}  // namespace weft::strategy::detail
