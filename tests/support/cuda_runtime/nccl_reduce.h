#pragma once

#include <cstddef>
#include <vector>

// The reductions of NCCL's calls, on host memory.
namespace weft::cuda_runtime {

// The values of nccl.h.
enum Type {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBFloat16
};
enum Operation { kSum, kProduct, kMax, kMin, kAverage };

// Returns the bytes of an element. Throws std::runtime_error for another type of NCCL.
std::size_t size_of(Type type);

// Reduces `size` elements of all inputs to `output`, in the order of the inputs; bfloat16 and
// float16 in float32. Throws std::runtime_error for another operation of NCCL.
void reduce(const std::vector<const void*>& inputs,
            void* output,
            std::size_t size,
            Type type,
            Operation operation);

}  // namespace weft::cuda_runtime
