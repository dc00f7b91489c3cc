#pragma once

// Collectives within a host that reduce, in rank order for every algorithm.

#include "collective.h"

namespace weft::collectives {

// REQUIRES: an operation that reduces.
CollectivePtr make_reduction(CollectiveCall call, int rank);

// In an all_reduce of a tensor of at most this size, every rank reduces the full tensor. For a
// larger tensor, each rank reduces one segment and copies the other segments from the ranks that
// reduced them: one barrier more, but less to read.
constexpr size_t kOneShotBytes = 16 * 1024;

}  // namespace weft::collectives
