#pragma once

// out[i] = sources[0][i] op sources[1][i] op ..., in this order for every size, so that every rank
// computes the same bits.

#include "types.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace weft::collectives {

// Whether `op` is defined for `dtype`. float8: none; complex: sum and average; bool: all but
// average; integers: all; other floating dtypes: all but bit operations.
bool can_reduce(ReduceOp op, DType dtype);

// Reduces the sources element by element into `out`, which may be one of them. Half types
// accumulate in float32 and are rounded once. Sums and products of integers wrap; an average of
// integers is the wrapped sum divided, truncated towards zero. For bool, sum and max are logical
// or, product and min logical and. min and max propagate NaN. An average divides by `divisor` or,
// if that is 0, by the number of sources. `streams`: writes `out` with non-temporal stores, see
// streaming.h. REQUIRES: can_reduce(op, dtype); at least one source.
void reduce(ReduceOp op,
            DType dtype,
            std::byte* out,
            std::span<const std::byte* const> sources,
            int64_t num_elements,
            int64_t divisor = 0,
            bool streams = false);

namespace detail {

struct ReduceJob {
  ReduceOp op;
  DType dtype;
  std::byte* out;
  const std::byte* const* sources;
  size_t num_sources;
  int64_t num_elements;
  int64_t divisor = 1;
  bool streams = false;
};

// The loops of reduce_loops.h, compiled once per instruction set.
void reduce_baseline(const ReduceJob& job);
void reduce_avx2(const ReduceJob& job);
void reduce_avx512(const ReduceJob& job);

using ReduceLoops = void (*)(const ReduceJob&);
// Returns the loops that this processor supports, widest registers first; never empty.
std::span<const ReduceLoops> supported_reduce_loops();

}  // namespace detail
}  // namespace weft::collectives
