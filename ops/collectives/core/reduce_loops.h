// Included by one file per instruction set. What it calls must be inlined, and it includes no
// header with code that another file could emit too: a function compiled for a wider instruction
// set must not be picked by the linker for everybody.
#include "reduce.h"
#include "streaming.h"

#include <weft/kernels/half_types.h>

namespace weft::collectives::detail {
namespace {

using kernels::cpu::BFloat16;
using kernels::cpu::Float16;

struct Bool {
  uint8_t value;
};

// What an element is computed as, and how it comes and goes.
template <typename T>
struct Element {
  using Value = T;
  static Value load(T x) { return x; }
  static void store(Value x, T& out) { out = x; }
};

template <typename T>
struct HalfElement {
  using Value = float;
  static Value load(T x) { return kernels::cpu::load(x); }
  static void store(Value x, T& out) { kernels::cpu::store(x, out); }
};
template <>
struct Element<BFloat16> : HalfElement<BFloat16> {};
template <>
struct Element<Float16> : HalfElement<Float16> {};

template <>
struct Element<Bool> {
  using Value = uint8_t;
  static Value load(Bool x) { return x.value != 0 ? 1 : 0; }
  static void store(Value x, Bool& out) { out.value = x; }
};

// Signed sums and products wrap: they are computed unsigned.
template <typename V>
struct Unsigned {
  using Type = V;
};
template <>
struct Unsigned<int8_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<int16_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<uint8_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<uint16_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<int32_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using Type = uint64_t;
};

struct Sum {
  template <typename V>
  static V apply(V a, V b) {
    using U = typename Unsigned<V>::Type;
    return static_cast<V>(static_cast<U>(a) + static_cast<U>(b));
  }
};
struct Product {
  template <typename V>
  static V apply(V a, V b) {
    using U = typename Unsigned<V>::Type;
    return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
  }
};
// A NaN on either side stays: the comparison fails for it, and it differs from itself.
struct Min {
  template <typename V>
  static V apply(V a, V b) {
    return (a < b || a != a) ? a : b;  // NOLINT(misc-redundant-expression)
  }
};
struct Max {
  template <typename V>
  static V apply(V a, V b) {
    return (a > b || a != a) ? a : b;  // NOLINT(misc-redundant-expression)
  }
};
struct And {
  template <typename V>
  static V apply(V a, V b) {
    return static_cast<V>(a & b);
  }
};
struct Or {
  template <typename V>
  static V apply(V a, V b) {
    return static_cast<V>(a | b);
  }
};
struct Xor {
  template <typename V>
  static V apply(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

// More ranks than an eight-bit integer counts may bring one.
template <typename V>
V average(V sum, int64_t divisor) {
  return static_cast<V>(static_cast<int64_t>(sum) / divisor);
}
template <>
inline uint64_t average(uint64_t sum, int64_t divisor) {
  return sum / static_cast<uint64_t>(divisor);
}
template <>
inline float average(float sum, int64_t divisor) {
  return sum / static_cast<float>(divisor);
}
template <>
inline double average(double sum, int64_t divisor) {
  return sum / static_cast<double>(divisor);
}

constexpr int64_t kBlock = 512;  // elements whose running value stays in the first cache

template <typename T, typename Operation, bool kAverage>
void run(const ReduceJob& job) {
  using E = Element<T>;
  using V = typename E::Value;
  auto* out = reinterpret_cast<T*>(job.out);
  auto* second_out = reinterpret_cast<T*>(job.second_out);
  V value[kBlock];
  for (int64_t first = 0; first < job.num_elements; first += kBlock) {
    const int64_t left = job.num_elements - first;
    const int64_t n = left < kBlock ? left : kBlock;
    const auto* source = reinterpret_cast<const T*>(job.sources[0]) + first;
    for (int64_t i = 0; i < n; ++i) value[i] = E::load(source[i]);
    for (size_t k = 1; k < job.num_sources; ++k) {
      source = reinterpret_cast<const T*>(job.sources[k]) + first;
      for (int64_t i = 0; i < n; ++i) value[i] = Operation::apply(value[i], E::load(source[i]));
    }
    if constexpr (kAverage) {
      for (int64_t i = 0; i < n; ++i) value[i] = average(value[i], job.divisor);
    }
    // The out of this block may be one of the sources: all are read by now.
    if (job.streams) {
      T block[kBlock];
      for (int64_t i = 0; i < n; ++i) E::store(value[i], block[i]);
      stream_bytes(reinterpret_cast<std::byte*>(out + first),
                   reinterpret_cast<const std::byte*>(block),
                   static_cast<size_t>(n) * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; ++i) E::store(value[i], out[first + i]);
    }
    if (second_out == nullptr) continue;
    for (int64_t i = 0; i < n; ++i) E::store(value[i], second_out[first + i]);
  }
  if (job.streams) finish_streaming();
}

template <typename T>
void run_bits(const ReduceJob& job) {
  if (job.op == ReduceOp::kBand) return run<T, And, false>(job);
  if (job.op == ReduceOp::kBor) return run<T, Or, false>(job);
  run<T, Xor, false>(job);
}

template <typename T, bool kInteger>
void run_any(const ReduceJob& job) {
  switch (job.op) {
    case ReduceOp::kSum:
      return run<T, Sum, false>(job);
    case ReduceOp::kAvg:
      return run<T, Sum, true>(job);
    case ReduceOp::kProduct:
      return run<T, Product, false>(job);
    case ReduceOp::kMin:
      return run<T, Min, false>(job);
    case ReduceOp::kMax:
      return run<T, Max, false>(job);
    default:
      break;
  }
  if constexpr (kInteger) run_bits<T>(job);
}

// Sums, products and bits of signed integers are those of unsigned ones: half the loops.
template <typename T, typename U>
void run_signed(const ReduceJob& job) {
  switch (job.op) {
    case ReduceOp::kAvg:
      return run<T, Sum, true>(job);
    case ReduceOp::kMin:
      return run<T, Min, false>(job);
    case ReduceOp::kMax:
      return run<T, Max, false>(job);
    default:
      return run_any<U, true>(job);
  }
}

void run_bool(const ReduceJob& job) {
  switch (job.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return run<Bool, Or, false>(job);
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return run<Bool, And, false>(job);
    default:
      return run<Bool, Xor, false>(job);
  }
}

void run_loops(const ReduceJob& job) {
  switch (job.dtype) {
    case DType::kBool:
      return run_bool(job);
    case DType::kUInt8:
      return run_any<uint8_t, true>(job);
    case DType::kInt8:
      return run_signed<int8_t, uint8_t>(job);
    case DType::kUInt16:
      return run_any<uint16_t, true>(job);
    case DType::kInt16:
      return run_signed<int16_t, uint16_t>(job);
    case DType::kUInt32:
      return run_any<uint32_t, true>(job);
    case DType::kInt32:
      return run_signed<int32_t, uint32_t>(job);
    case DType::kUInt64:
      return run_any<uint64_t, true>(job);
    case DType::kInt64:
      return run_signed<int64_t, uint64_t>(job);
    case DType::kFloat16:
      return run_any<Float16, false>(job);
    case DType::kBFloat16:
      return run_any<BFloat16, false>(job);
    case DType::kFloat32:
      return run_any<float, false>(job);
    case DType::kFloat64:
      return run_any<double, false>(job);
    default:
      return;
  }
}

}  // namespace
}  // namespace weft::collectives::detail
