#pragma once

// out[i] = sources[0][i] op sources[1][i] op ..., in this order whatever the sizes, so that every
// rank computes the same bits.

#include "types.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace weft::collectives {

// Whether `op` is defined on `dtype`: bit operations on integers and bool, an average on anything
// but bool, sums and averages alone on complex numbers, none at all on float8.
bool can_reduce(ReduceOp op, DType dtype);

// Half types accumulate in float32 and round once. Integers wrap; their average truncates. bool:
// sum is or, product is and. min and max give NaN where any source has one.
// `out` may be one of the sources. An average is over `divisor`; 0: over the sources. `streams`:
// `out` past the caches, see streaming.h. REQUIRES: can_reduce(op, dtype); at least one source.
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

// reduce_loops.h, compiled once per instruction set.
void reduce_baseline(const ReduceJob& job);
void reduce_avx2(const ReduceJob& job);
void reduce_avx512(const ReduceJob& job);

using ReduceLoops = void (*)(const ReduceJob&);
// Those that the running processor executes, widest first; never empty.
std::span<const ReduceLoops> supported_reduce_loops();

}  // namespace detail
}  // namespace weft::collectives
