#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#define C10_CUDA_CHECK(expression)                                                              \
  do {                                                                                          \
    const cudaError_t error = (expression);                                                     \
    TORCH_CHECK(error == cudaSuccess, "CUDA error in the emulator: ", static_cast<int>(error)); \
  } while (0)
