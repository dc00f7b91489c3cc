#pragma once

// Collectives within a host that reduce, in the order of the ranks whatever the algorithm.

#include "collective.h"

namespace weft::collectives {

// REQUIRES: an operation that reduces.
CollectivePtr make_reduction(CollectiveCall call, int rank);

// Up to this many bytes each rank reduces everything by itself; beyond, each reduces a slice and
// all fetch the slices: one wait more, and less to read.
constexpr size_t kOneShotBytes = 16 * 1024;

}  // namespace weft::collectives
