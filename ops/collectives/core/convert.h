#pragma once

// Converts between an element type and the wider type of its partial sums between hosts.

#include "types.h"

#include <cstddef>
#include <cstdint>

namespace weft::collectives {

// Returns float32 for the half types, complex64 for complex32, otherwise `dtype` itself.
DType wide_of(DType dtype);

// Element by element; rounds to nearest, ties to even. REQUIRES: wide_of(dtype) != dtype.
void widen(DType dtype, const std::byte* in, std::byte* wide, int64_t num_elements);
void narrow(DType dtype, const std::byte* wide, std::byte* out, int64_t num_elements);

}  // namespace weft::collectives
