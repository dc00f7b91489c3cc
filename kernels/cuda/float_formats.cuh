#pragma once

#include "low_precision.h"
#include "optimizer_step_job.h"
#include "vector_access.cuh"

#include <cstdint>

// Loads and stores of packs of elements in the formats of low_precision.h, as float32.
namespace weft::kernels::cuda {

// load_pack() and store_pack() with at most kVectorBytes at a time.
template <typename Storage, typename Scalar, int kWidth>
__device__ __forceinline__ void load_elements(const void* data,
                                              int64_t begin,
                                              Scalar (&out)[kWidth]) {
  constexpr int kMost = kVectorBytes / static_cast<int>(sizeof(Storage));
  if constexpr (kWidth <= kMost) {
    load_pack<Storage>(data, begin, out);
  } else {
#pragma unroll
    for (int first = 0; first < kWidth; first += kMost) {
      Scalar part[kMost];
      load_pack<Storage>(data, begin + first, part);
#pragma unroll
      for (int i = 0; i < kMost; ++i) out[first + i] = part[i];
    }
  }
}

template <typename Storage, typename Scalar, int kWidth>
__device__ __forceinline__ void store_elements(void* data,
                                               int64_t begin,
                                               const Scalar (&values)[kWidth]) {
  constexpr int kMost = kVectorBytes / static_cast<int>(sizeof(Storage));
  if constexpr (kWidth <= kMost) {
    store_pack<Storage>(data, begin, values);
  } else {
#pragma unroll
    for (int first = 0; first < kWidth; first += kMost) {
      Scalar part[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) part[i] = values[first + i];
      store_pack<Storage>(data, begin + first, part);
    }
  }
}

template <int kWidth>
__device__ __forceinline__ void load_bfloat16(const void* data,
                                              int64_t begin,
                                              float (&out)[kWidth]) {
  uint16_t bits[kWidth];
  load_elements<uint16_t>(data, begin, bits);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = detail::from_bfloat16(bits[i]);
}

template <int kWidth>
__device__ __forceinline__ void load_split(
    const void* high, const void* low, bool is_narrow, int64_t begin, float (&out)[kWidth]) {
  uint16_t upper[kWidth];
  int32_t lower[kWidth];
  load_elements<uint16_t>(high, begin, upper);
  if (is_narrow) {
    load_elements<int8_t>(low, begin, lower);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) lower[i] *= 256;
  } else {
    load_elements<int16_t>(low, begin, lower);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = detail::join(upper[i], lower[i]);
}

template <int kWidth>
__device__ __forceinline__ void store_split(
    void* high, void* low, bool is_narrow, int64_t begin, const float (&x)[kWidth]) {
  uint16_t upper[kWidth];
  int16_t lower[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const detail::SplitFloat value = detail::split(x[i], is_narrow);
    upper[i] = value.high;
    lower[i] = static_cast<int16_t>(is_narrow ? value.low >> 8 : value.low);
  }
  store_elements<uint16_t>(high, begin, upper);
  if (is_narrow) {
    store_elements<int8_t>(low, begin, lower);
  } else {
    store_elements<int16_t>(low, begin, lower);
  }
}

// The elements of the parameter of a step.
template <int kWidth>
__device__ __forceinline__ void load_weights(const detail::OptimizerStepJob& job,
                                             int64_t begin,
                                             float (&out)[kWidth]) {
  using Format = detail::WeightFormat;
  if (job.weight_format == Format::kFloat32) {
    load_elements<float>(job.parameter, begin, out);
  } else if (job.weight_format == Format::kBFloat16) {
    load_bfloat16(job.parameter, begin, out);
  } else {
    load_split(job.parameter, job.low_bits, job.weight_format == Format::kSplit8, begin, out);
  }
}

template <int kWidth>
__device__ __forceinline__ void store_weights(const detail::OptimizerStepJob& job,
                                              int64_t begin,
                                              const float (&x)[kWidth]) {
  using Format = detail::WeightFormat;
  if (job.weight_format == Format::kFloat32) {
    store_elements<float>(job.parameter, begin, x);
  } else if (job.weight_format == Format::kBFloat16) {
    uint16_t bits[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bits[i] = detail::to_bfloat16_nearest(x[i]);
    store_elements<uint16_t>(job.parameter, begin, bits);
  } else {
    store_split(job.parameter, job.low_bits, job.weight_format == Format::kSplit8, begin, x);
  }
}

// `step`: see code_step() in low_precision.h.
template <bool kIsSigned, int kWidth>
__device__ __forceinline__ void load_codes(const void* codes,
                                           float step,
                                           int64_t begin,
                                           float (&out)[kWidth]) {
  int32_t values[kWidth];
  if constexpr (kIsSigned) {
    load_elements<int8_t>(codes, begin, values);
  } else {
    load_elements<uint8_t>(codes, begin, values);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    out[i] = kIsSigned ? detail::from_signed_code(values[i], step)
                       : detail::from_unsigned_code(values[i], step);
  }
}

// Stores the codes of x or, unless kIsSigned, of the squares of x. `u`: uniform numbers in [0, 1).
// REQUIRES: x is finite.
template <bool kIsSigned, int kWidth>
__device__ __forceinline__ void store_codes(
    void* codes, float factor, int64_t begin, const float (&x)[kWidth], const float (&u)[kWidth]) {
  int32_t values[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    values[i] = kIsSigned ? detail::signed_code(x[i], factor, u[i])
                          : detail::unsigned_code(x[i], factor, u[i]);
  }
  if constexpr (kIsSigned) {
    store_elements<int8_t>(codes, begin, values);
  } else {
    store_elements<uint8_t>(codes, begin, values);
  }
}

}  // namespace weft::kernels::cuda
