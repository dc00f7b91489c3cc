#include "convert.h"

#include <weft/kernels/half_types.h>

namespace weft::collectives {

namespace {

using kernels::cpu::BFloat16;
using kernels::cpu::Float16;

template <typename T>
void widen_all(const std::byte* in, std::byte* wide, int64_t n) {
  const auto* from = reinterpret_cast<const T*>(in);
  auto* to = reinterpret_cast<float*>(wide);
  for (int64_t i = 0; i < n; ++i) to[i] = kernels::cpu::load(from[i]);
}

template <typename T>
void narrow_all(const std::byte* wide, std::byte* out, int64_t n) {
  const auto* from = reinterpret_cast<const float*>(wide);
  auto* to = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) kernels::cpu::store(from[i], to[i]);
}

int64_t num_values(DType dtype, int64_t num_elements) {
  return dtype == DType::kComplex32 ? 2 * num_elements : num_elements;
}

}  // namespace

DType accumulation_dtype_of(DType dtype) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return DType::kFloat32;
  return dtype == DType::kComplex32 ? DType::kComplex64 : dtype;
}

void widen(DType dtype, const std::byte* in, std::byte* wide, int64_t num_elements) {
  const int64_t n = num_values(dtype, num_elements);
  return dtype == DType::kBFloat16 ? widen_all<BFloat16>(in, wide, n)
                                   : widen_all<Float16>(in, wide, n);
}

void narrow(DType dtype, const std::byte* wide, std::byte* out, int64_t num_elements) {
  const int64_t n = num_values(dtype, num_elements);
  return dtype == DType::kBFloat16 ? narrow_all<BFloat16>(wide, out, n)
                                   : narrow_all<Float16>(wide, out, n);
}

}  // namespace weft::collectives
