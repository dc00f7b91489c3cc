#pragma once

#include "low_precision.h"

#include <cstdint>

// Describes a conversion of <weft/kernels/float_codes.h> by sizes and pointers only.
namespace weft::kernels::detail {

enum class FloatCodesOp { kSplit, kJoin, kQuantize, kDequantize };

struct FloatCodesJob {
  FloatCodesOp op;
  bool is_narrow;         // kSplit, kJoin: the lower bits are int8, else int16
  bool is_signed;         // kQuantize, kDequantize: the codes are int8, else uint8
  int64_t num_rows;       // 1 for kSplit and kJoin
  int64_t row_size;       // at least 1
  void* x = nullptr;      // float32
  void* codes = nullptr;  // kSplit, kJoin: the bfloat16 upper halves
  void* low = nullptr;
  float* scales = nullptr;

  int64_t blocks_per_row() const { return (row_size + kCodeBlock - 1) / kCodeBlock; }
};

}  // namespace weft::kernels::detail
