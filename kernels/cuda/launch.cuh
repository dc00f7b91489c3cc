#pragma once

#include "storage_type.h"
#include "vector_access.cuh"

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <initializer_list>

// Helpers of every launch: device attributes, alignment of arrays, and dispatch on the element
// type.
namespace weft::kernels::cuda {

inline int attribute(cudaDeviceAttr name, c10::Device device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device.index()));
  return value;
}

inline int num_multiprocessors(c10::Device device) {
  return attribute(cudaDevAttrMultiProcessorCount, device);
}

// Returns whether all pointers are aligned to kVectorBytes. Null pointers are.
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

}  // namespace weft::kernels::cuda
