#pragma once

// Operations, reductions and element types, as ranks tell each other about them.

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
};
std::string_view name_of(Op op);

enum class ReduceOp : uint8_t { kNone, kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };
std::string_view name_of(ReduceOp op);

// kFloat8 is only moved; see can_reduce for the others.
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
  kFloat8,  // any of the eight-bit formats
  kComplex32,
  kComplex64,
  kComplex128,
};
std::string_view name_of(DType dtype);
size_t size_of(DType dtype);

}  // namespace weft::collectives
