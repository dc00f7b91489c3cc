#pragma once

#include "cuda_emulator.h"

#include <cstddef>
#include <math.h>  // NOLINT: exp and sqrt of floats in the global namespace, as nvcc has them
#include <tuple>
#include <type_traits>
#include <utility>

// Stands in for CUDA's header of this name: the part of the language and of the runtime that
// kernels/cuda uses, on the emulator. Include it (-include) in every file that nvcc would compile.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Internal linkage and one section, whose memory the emulator poisons before each block.
#define __shared__ static __attribute__((section("weft_emulated_shared")))

using dim3 = weft::cuda_emulator::Dims;

inline const weft::cuda_emulator::Dims& threadIdx = weft::cuda_emulator::current().thread;
inline const weft::cuda_emulator::Dims& blockIdx = weft::cuda_emulator::current().block;
inline const weft::cuda_emulator::Dims& blockDim = weft::cuda_emulator::current().block_size;
inline const weft::cuda_emulator::Dims& gridDim = weft::cuda_emulator::current().grid_size;

inline void __syncthreads() { weft::cuda_emulator::sync_block(); }

template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask) {
  static_assert(std::is_arithmetic_v<Value>);
  Value result;
  weft::cuda_emulator::shuffle_xor(mask, &value, &result, sizeof(Value), lane_mask);
  return result;
}

// In double, because CUDA's normcdff is accurate where the rounding of -x / sqrt(2) would matter.
inline float normcdff(float x) {
  return static_cast<float>(0.5 * erfc(-static_cast<double>(x) * 0.70710678118654752440));
}
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

inline float __fdividef(float a, float b) { return a / b; }

namespace weft::kernels::cuda {
// See kernels/cuda/dynamic_shared.cuh.
inline void* dynamic_shared_memory() { return cuda_emulator::dynamic_shared_memory(); }
}  // namespace weft::kernels::cuda

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor
};

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int /*device*/) {
  const auto& device = weft::cuda_emulator::settings().device;
  switch (name) {
    case cudaDevAttrMultiProcessorCount:
      *value = device.num_multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device.shared_bytes_per_block;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = device.shared_bytes_per_multiprocessor;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const auto& settings = weft::cuda_emulator::settings();
  const bool is_captured =
      settings.streams == nullptr ? settings.is_capturing : settings.streams->is_captured(stream);
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute /*name*/, int value) {
  weft::cuda_emulator::allow_shared_bytes(reinterpret_cast<const void*>(kernel), value);
  return cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

template <typename... Params, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Params...),
                               Arguments&&... arguments) {
  const auto run = [values = std::tuple<Params...>(std::forward<Arguments>(arguments)...),
                    kernel,
                    config = *config] {
    weft::cuda_emulator::launch({.kernel = reinterpret_cast<const void*>(kernel),
                                 .grid_size = config.gridDim,
                                 .block_size = config.blockDim,
                                 .shared_bytes = config.dynamicSmemBytes},
                                [&] { std::apply(kernel, values); });
  };
  auto* const streams = weft::cuda_emulator::settings().streams;
  if (streams == nullptr) {
    run();
  } else {
    streams->submit(config->stream, run);
  }
  return cudaSuccess;
}
