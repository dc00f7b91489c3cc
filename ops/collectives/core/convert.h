#pragma once

// Between an element type and the one that partial sums of it travel in.

#include "types.h"

#include <cstddef>
#include <cstdint>

namespace weft::collectives {

// float32 for the half types, complex64 for their pairs, otherwise `dtype` itself.
DType wide_of(DType dtype);

// Element by element; rounds to nearest, ties to even. REQUIRES: wide_of(dtype) != dtype.
void widen(DType dtype, const std::byte* in, std::byte* wide, int64_t num_elements);
void narrow(DType dtype, const std::byte* wide, std::byte* out, int64_t num_elements);

}  // namespace weft::collectives
