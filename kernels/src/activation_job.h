#pragma once

#include "storage_type.h"

#include <weft/kernels/activation_kind.h>

#include <cstdint>

// Describes one elementwise pass by sizes and pointers only, so that the code that runs it needs no
// tensor headers. All arrays are contiguous and of one type; pointers are borrowed.
namespace weft::kernels::detail {

enum class ActivationOp { kForward, kBackward, kGatedForward, kGatedBackward };

// Unused pointers are null. `x` is the gate of the gated operations. With `row_size` > 0, the rows
// of gate and up alternate in one array, [gate row | up row], and so do those of grad_x and
// grad_up; `x` and `up`, `grad_x` and `grad_up` point to the first row of each.
struct ActivationJob {
  ActivationOp op;
  Activation activation;
  StorageType type;
  int64_t num_elements;  // of h
  int64_t row_size = 0;
  const void* grad_h = nullptr;
  const void* x = nullptr;
  const void* up = nullptr;
  void* h = nullptr;
  void* grad_x = nullptr;
  void* grad_up = nullptr;
};

}  // namespace weft::kernels::detail
