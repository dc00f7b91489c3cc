#pragma once

// Operations, reductions and element types, as stored in signatures.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace weft::collectives {

enum class Op : uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSparseAllReduce,
};
std::string_view name_of(Op op);

enum class ReduceOp : uint8_t { kNone, kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };
std::string_view name_of(ReduceOp op);

// The float8 formats cannot be reduced; see can_reduce for the others.
enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kFloat8E5M2,
  kFloat8E5M2FNUZ,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat8E8M0FNU,
  kComplex32,
  kComplex64,
  kComplex128,
};
std::string_view name_of(DType dtype);
size_t size_of(DType dtype);
constexpr bool is_float8(DType dtype) {
  return dtype >= DType::kFloat8E5M2 && dtype <= DType::kFloat8E8M0FNU;
}
constexpr bool is_complex(DType dtype) { return dtype >= DType::kComplex32; }

}  // namespace weft::collectives
