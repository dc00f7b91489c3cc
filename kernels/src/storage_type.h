#pragma once

#include <cstdint>

// The element types of arrays in memory, for code that includes no tensor header. The compute type
// (float, or double for kFloat64) may be wider.
namespace weft::kernels::detail {

enum class StorageType { kFloat32, kFloat64, kBFloat16, kFloat16 };

constexpr int64_t element_bytes(StorageType type) {
  return type == StorageType::kFloat64 ? 8 : type == StorageType::kFloat32 ? 4 : 2;
}

}  // namespace weft::kernels::detail
