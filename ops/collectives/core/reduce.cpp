#include "reduce.h"

#include <vector>

namespace weft::collectives {

namespace {

DType component_dtype(DType dtype) {
  if (dtype == DType::kComplex32) return DType::kFloat16;
  return dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
}

}  // namespace

bool can_reduce(ReduceOp op, DType dtype) {
  if (op == ReduceOp::kNone || is_float8(dtype)) return false;
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAvg;
  switch (op) {
    case ReduceOp::kAvg:
      return dtype != DType::kBool;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return dtype < DType::kFloat16;  // bool and integers
    default:
      return true;
  }
}

namespace detail {

std::span<const ReduceLoops> supported_reduce_loops() {
  static const std::vector<ReduceLoops> supported = [] {
    std::vector<ReduceLoops> loops;
#if defined(__x86_64__)
    // These features must match the options of reduce_loops_*.cpp in
    // ops/collectives/CMakeLists.txt.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      loops.push_back(reduce_avx512);
    }
    if (__builtin_cpu_supports("avx2")) loops.push_back(reduce_avx2);
#endif
    loops.push_back(reduce_baseline);
    return loops;
  }();
  return supported;
}

}  // namespace detail

void reduce(ReduceOp op,
            DType dtype,
            std::byte* out,
            std::span<const std::byte* const> sources,
            int64_t num_elements,
            int64_t divisor,
            bool streams) {
  // Real and imaginary parts are summed independently.
  if (is_complex(dtype)) {
    num_elements *= 2;
    dtype = component_dtype(dtype);
  }
  if (divisor == 0) divisor = static_cast<int64_t>(sources.size());
  detail::supported_reduce_loops().front()(
      {op, dtype, out, sources.data(), sources.size(), num_elements, divisor, streams});
}

}  // namespace weft::collectives
