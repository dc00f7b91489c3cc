#pragma once

// Collectives within a host that reduce, in rank order for every algorithm.

#include "collective.h"

namespace weft::collectives {

// REQUIRES: an operation that reduces.
CollectivePtr make_reduction(CollectiveCall call, int rank);

// all_reduce: up to this size of the tensor every rank reduces the full tensor. Beyond, it reduces
// one segment and reads the other reduced segments: one barrier more, but less to read.
constexpr size_t kOneShotBytes = 16 * 1024;

}  // namespace weft::collectives
