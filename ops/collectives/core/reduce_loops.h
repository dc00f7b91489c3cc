// This header is included by one file per instruction set. All functions that it calls must be
// inlined, and it must not include headers with functions that other files could emit too: the
// linker could pick the copy compiled for a wider instruction set for all callers.
#include "reduce.h"
#include "streaming.h"

#include <weft/kernels/half_types.h>

#include <type_traits>

namespace weft::collectives::detail {
namespace {

using kernels::cpu::BFloat16;
using kernels::cpu::Float16;

struct Bool {
  uint8_t value;
};

// The type that an element is computed in, its load and its store.
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

// Integer sums and products are computed in an unsigned type, where overflow is defined: it wraps.
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
// NaN on either side propagates: a comparison with it is false, and it differs from itself.
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

// Divides in int64_t: the number of ranks may exceed the range of an 8-bit integer.
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

// Copies a block to `out`; if kStreams, with non-temporal stores of full cache lines.
template <int64_t kBytes, bool kStreams>
__attribute__((always_inline)) inline void put_block(std::byte* out, const std::byte* block) {
  if constexpr (kStreams) {
    stream_lines<kBytes>(out, block);
  } else {
    // Uses wider registers than memcpy().
    constexpr int64_t kWidth = __BIGGEST_ALIGNMENT__;
    typedef uint8_t Register __attribute__((vector_size(kWidth), may_alias, aligned(1)));  // NOLINT
    static_assert(alignof(Register) == 1);
    for (int64_t i = 0; i < kBytes; i += kWidth) {
      *reinterpret_cast<Register*>(out + i) = *reinterpret_cast<const Register*>(block + i);
    }
  }
}

// One loop for any number of sources: the running values of a block stay in registers while its
// sources are read one after the other. Blocks are small so that the hardware prefetcher sees each
// source as a stream.
template <typename T, typename Operation, bool kAverage>
class Loop {
 public:
  explicit Loop(const ReduceJob& job) : job_(job) {}

  void run() const {
    int64_t first = 0;
    const bool streams = job_.streams && reinterpret_cast<uintptr_t>(job_.out) % sizeof(T) == 0;
    if (streams) {
      const auto past_line = reinterpret_cast<uintptr_t>(job_.out) % 64;
      const auto to_line = static_cast<int64_t>((64 - past_line) % 64 / sizeof(T));
      first = to_line < job_.num_elements ? to_line : job_.num_elements;
      partial_blocks(0, first);
      for (; first + kBlock <= job_.num_elements; first += kBlock) block<true>(first);
    } else {
      for (; first + kBlock <= job_.num_elements; first += kBlock) block<false>(first);
    }
    partial_blocks(first, job_.num_elements - first);
    if (streams) finish_streaming();
  }

 private:
  using E = Element<T>;
  using V = typename E::Value;
  static constexpr int64_t kBlock = 256 / sizeof(V);
  static constexpr int64_t kBlockBytes = kBlock * sizeof(T);

  const T* source_at(size_t k, int64_t first) const {
    return reinterpret_cast<const T*>(job_.sources[k]) + first;
  }

  // Prefetches the lines of a later block: the hardware prefetcher is too late between the caches
  // of two processors. Measured with benchmarks/collectives.py.
  static __attribute__((always_inline)) inline void fetch_ahead(const void* block, int64_t ahead) {
    const auto* bytes = static_cast<const std::byte*>(block) + ahead;
    for (int64_t i = 0; i < kBlockBytes; i += 64) __builtin_prefetch(bytes + i);
  }
  static constexpr int64_t kAhead = 2048;          // bytes, in a source
  static constexpr int64_t kAheadOfWrites = 1024;  // bytes, in the output
  // Whether the block at `first` prefetches. Blocks near the end do not: past the end begins the
  // segment of another rank, which that rank is writing.
  bool fetches_at(int64_t first) const {
    return first + kBlock + kAhead / static_cast<int64_t>(sizeof(T)) <= job_.num_elements;
  }

  // Reduces n <= kBlock elements from `first` on into `block`.
  __attribute__((always_inline)) inline void compute(int64_t first,
                                                     int64_t n,
                                                     bool fetches,
                                                     T* block) const {
    alignas(64) V converted[kBlock];
    V* value = converted;
    if constexpr (std::is_same_v<T, V>) value = block;
    const T* source = source_at(0, first);
    if (fetches) fetch_ahead(source, kAhead);
    if (job_.num_sources == 1) {
      for (int64_t i = 0; i < n; ++i) value[i] = E::load(source[i]);
    } else {
      // Combine the first two sources directly: a separate copy of the first would use narrower
      // registers.
      const T* second = source_at(1, first);
      if (fetches) fetch_ahead(second, kAhead);
      for (int64_t i = 0; i < n; ++i) {
        value[i] = Operation::apply(E::load(source[i]), E::load(second[i]));
      }
    }
    for (size_t k = 2; k < job_.num_sources; ++k) {
      source = source_at(k, first);
      if (fetches) fetch_ahead(source, kAhead);
      for (int64_t i = 0; i < n; ++i) value[i] = Operation::apply(value[i], E::load(source[i]));
    }
    if constexpr (kAverage) {
      for (int64_t i = 0; i < n; ++i) value[i] = average(value[i], job_.divisor);
    }
    if constexpr (!std::is_same_v<T, V>) {
      for (int64_t i = 0; i < n; ++i) E::store(value[i], block[i]);
    }
  }

  // `out` may be one of the sources: it is written after all sources of the block have been read.
  template <bool kStreams>
  __attribute__((always_inline)) inline void block(int64_t first) const {
    alignas(64) T results[kBlock];
    const bool fetches = fetches_at(first);
    compute(first, kBlock, fetches, results);
    const auto* bytes = reinterpret_cast<const std::byte*>(results);
    const size_t offset = static_cast<size_t>(first) * sizeof(T);
    put_block<kBlockBytes, kStreams>(job_.out + offset, bytes);
    if (!kStreams && fetches) fetch_ahead(job_.out + offset, kAheadOfWrites);
  }

  // The elements before and after the full blocks.
  void partial_blocks(int64_t first, int64_t n) const {
    T results[kBlock];
    while (n > 0) {
      const int64_t now = n < kBlock ? n : kBlock;
      compute(first, now, /*fetches=*/false, results);
      const size_t offset = static_cast<size_t>(first) * sizeof(T);
      __builtin_memcpy(job_.out + offset, results, static_cast<size_t>(now) * sizeof(T));
      first += now;
      n -= now;
    }
  }

  const ReduceJob& job_;
};

template <typename T, typename Operation, bool kAverage>
void run(const ReduceJob& job) {
  Loop<T, Operation, kAverage>(job).run();
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

// Sum, product and bit operations give the same bits for signed and unsigned integers: sharing the
// unsigned loops halves their number.
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
