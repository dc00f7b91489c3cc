#pragma once

// Collectives within a host that reduce, in rank order for every algorithm.

#include "collective.h"

namespace weft::collectives {

// Returns the collective that carries out `call` on rank `rank`. REQUIRES: its operation reduces.
CollectivePtr make_reduction(CollectiveCall call, int rank);

// In an all_reduce of a tensor of at most this size, every rank reduces the full tensor. For a
// larger tensor, each rank reduces one segment and copies the other segments from the ranks that
// reduced them: this takes one more barrier but reads less.
constexpr size_t kOneShotBytes = 16 * 1024;

}  // namespace weft::collectives
