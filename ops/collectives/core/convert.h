#pragma once

// Converts between a dtype and its accumulation dtype, in which hosts exchange partial results.

#include "types.h"

#include <cstddef>
#include <cstdint>

namespace weft::collectives {

// Returns the accumulation dtype: float32 for the half types, complex64 for complex32, otherwise
// `dtype` itself.
DType accumulation_dtype_of(DType dtype);

// widen() converts to the accumulation dtype, narrow() back to `dtype`; narrow() rounds to nearest,
// ties to even. REQUIRES: accumulation_dtype_of(dtype) != dtype.
void widen(DType dtype, const std::byte* in, std::byte* wide, int64_t num_elements);
void narrow(DType dtype, const std::byte* wide, std::byte* out, int64_t num_elements);

}  // namespace weft::collectives
