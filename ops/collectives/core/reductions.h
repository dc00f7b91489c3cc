#pragma once

// Collectives that reduce, in the order of the ranks whatever the algorithm. REQUIRES:
// can_reduce(op, dtype). Pointers stay the caller's and must live until the operation is done; an
// output may be the input.

#include "exchanges.h"
#include "types.h"

namespace weft::collectives {

CollectivePtr make_all_reduce(const TensorFacts& facts, ReduceOp op, Input input, Output output);
// `output` is written on the root alone.
CollectivePtr make_reduce(
    const TensorFacts& facts, ReduceOp op, Input input, Output output, int root, int rank);
// inputs[r] is this rank's share of what rank r receives; sizes may differ from r to r.
CollectivePtr make_reduce_scatter(
    DType dtype, ReduceOp op, std::vector<Input> inputs, Output output, int rank);

// Up to this many bytes each rank reduces everything by itself; beyond, each reduces a slice and
// all fetch the slices: one wait more, and less to read.
constexpr size_t kOneShotBytes = 16 * 1024;

}  // namespace weft::collectives
