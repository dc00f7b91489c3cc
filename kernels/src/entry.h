#pragma once

#include "storage_type.h"

#include <ATen/core/Tensor.h>

#include <optional>

// Helpers for building jobs from tensors.
namespace weft::kernels::detail {

// Returns whether `type` is float32, float64, bfloat16 or float16.
bool is_supported(at::ScalarType type);

// REQUIRES: is_supported(type).
StorageType storage_type(at::ScalarType type);

// Returns the compute type of a storage type: float64 for float64, else float32.
at::ScalarType compute_type_of(at::ScalarType storage);

inline const at::Tensor* optional_ptr(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}

// Keeps the contiguous form of an optional operand alive while a job reads it.
class ContiguousOperand {
 public:
  explicit ContiguousOperand(const at::Tensor* tensor) {
    if (tensor != nullptr) tensor_ = tensor->expect_contiguous();
  }

  const void* data() const { return tensor_->defined() ? tensor_->const_data_ptr() : nullptr; }

 private:
  c10::MaybeOwned<at::Tensor> tensor_ = c10::MaybeOwned<at::Tensor>::owned(std::in_place);
};

}  // namespace weft::kernels::detail
