#include "nccl_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace weft::cuda_runtime {
namespace {

struct BFloat16 {
  uint16_t bits;

  // Rounds to the nearest, ties to even. Implicit, like the conversions of the other types.
  BFloat16(float value) {  // NOLINT
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    bits = std::isnan(value) ? uint16_t{0x7FC0}
                             : static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
  }
  operator float() const {  // NOLINT
    const uint32_t word = uint32_t{bits} << 16;
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

template <typename Value, typename Accumulated = Value>
void reduce_as(const std::vector<const void*>& inputs,
               void* output,
               std::size_t count,
               Operation op) {
  for (std::size_t i = 0; i < count; ++i) {
    Accumulated total = static_cast<const Value*>(inputs[0])[i];
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      const Accumulated value = static_cast<const Value*>(inputs[rank])[i];
      switch (op) {
        case kProduct:
          total = static_cast<Accumulated>(total * value);
          break;
        case kMax:
          total = std::max(total, value);
          break;
        case kMin:
          total = std::min(total, value);
          break;
        default:
          total = static_cast<Accumulated>(total + value);
      }
    }
    if (op == kAverage)
      total = static_cast<Accumulated>(total / static_cast<Accumulated>(inputs.size()));
    static_cast<Value*>(output)[i] = static_cast<Value>(total);
  }
}

}  // namespace

std::size_t size_of(Type type) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  if (type < kInt8 || type > kBFloat16) {
    throw std::runtime_error("NCCL without a device: got dtype " + std::to_string(type) +
                             ", expected one of 0 to 9; use another dtype");
  }
  return kSizes[type];
}

void reduce(const std::vector<const void*>& inputs,
            void* output,
            std::size_t count,
            Type type,
            Operation op) {
  if (op < kSum || op > kAverage) {
    throw std::runtime_error("NCCL without a device: got operation " + std::to_string(op) +
                             ", expected one of 0 to 4; use another operation");
  }
  switch (type) {
    case kInt8:
      return reduce_as<int8_t>(inputs, output, count, op);
    case kUint8:
      return reduce_as<uint8_t>(inputs, output, count, op);
    case kInt32:
      return reduce_as<int32_t>(inputs, output, count, op);
    case kUint32:
      return reduce_as<uint32_t>(inputs, output, count, op);
    case kInt64:
      return reduce_as<int64_t>(inputs, output, count, op);
    case kUint64:
      return reduce_as<uint64_t>(inputs, output, count, op);
    case kFloat16:
      return reduce_as<_Float16, float>(inputs, output, count, op);
    case kFloat32:
      return reduce_as<float>(inputs, output, count, op);
    case kFloat64:
      return reduce_as<double>(inputs, output, count, op);
    case kBFloat16:
      return reduce_as<BFloat16, float>(inputs, output, count, op);
  }
}

}  // namespace weft::cuda_runtime
