#pragma once

#include "storage_type.h"
#include "vector_access.cuh"

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>

// Helpers of every launch: device attributes, alignment of arrays, dispatch on the element type,
// and the launch itself.
namespace weft::kernels::cuda {

inline int attribute(cudaDeviceAttr name, c10::Device device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device.index()));
  return value;
}

inline int num_multiprocessors(c10::Device device) {
  return attribute(cudaDevAttrMultiProcessorCount, device);
}

// Returns whether all pointers are multiples of kVectorBytes, as null pointers are.
inline bool is_vector_aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return bits % kVectorBytes == 0;
}

// Calls visit.operator()<Storage>() with the type that `type` names.
template <typename Visit>
void visit_storage(detail::StorageType type, const Visit& visit) {
  switch (type) {
    case detail::StorageType::kFloat32:
      return visit.template operator()<float>();
    case detail::StorageType::kFloat64:
      return visit.template operator()<double>();
    case detail::StorageType::kBFloat16:
      return visit.template operator()<c10::BFloat16>();
    case detail::StorageType::kFloat16:
      return visit.template operator()<c10::Half>();
  }
}

// The second argument of __launch_bounds__; 0 leaves the number of registers to the compiler, which
// for float64 would spill some, to make more threads resident than the arithmetic needs.
template <typename Storage>
inline constexpr int kMinBlocks = std::is_same_v<Storage, double> ? 1 : 0;

struct LaunchShape {
  dim3 num_blocks;
  dim3 num_threads;  // of a block
  size_t dynamic_shared_bytes = 0;
};

// Launches a kernel on `stream`; throws c10::Error if the launch fails. A call, not <<<>>>, so that
// any C++ compiler can read these files: see tests/support/cuda_emulator.
template <typename... Params, typename... Arguments>
void launch_kernel(void (*kernel)(Params...),
                   const LaunchShape& shape,
                   cudaStream_t stream,
                   Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.num_blocks;
  config.blockDim = shape.num_threads;
  config.dynamicSmemBytes = shape.dynamic_shared_bytes;
  config.stream = stream;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace weft::kernels::cuda
