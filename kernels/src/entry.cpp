#include "entry.h"

namespace weft::kernels::detail {

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

StorageType storage_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return StorageType::kFloat32;
    case at::kDouble:
      return StorageType::kFloat64;
    case at::kBFloat16:
      return StorageType::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(type == at::kHalf, "unchecked dtype ", type);
      return StorageType::kFloat16;
  }
}

at::ScalarType compute_type_of(at::ScalarType storage) {
  return storage == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace weft::kernels::detail
