#pragma once

#include <bit>
#include <cstdint>

// Conversions of the 16-bit types as integer arithmetic without branches, because c10's conversions
// use instructions or tables that keep a loop from vectorising. Rounding is to nearest even, as in
// c10.
// Everything here has internal linkage and is inlined, because the files that include this header
// are compiled for several instruction sets.
#define WEFT_ALWAYS_INLINE inline __attribute__((always_inline))

namespace weft::kernels::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

WEFT_ALWAYS_INLINE float load(float value) { return value; }
WEFT_ALWAYS_INLINE double load(double value) { return value; }

WEFT_ALWAYS_INLINE float load(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

WEFT_ALWAYS_INLINE float load(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFU;
  // Moves the exponent and mantissa to their positions in a float, then rescales by 2^(127 - 15):
  // exact for normal and subnormal numbers alike.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  const uint32_t not_finite = 0x7F800000U | (magnitude << 13);
  const uint32_t absolute = magnitude >= 0x7C00U ? not_finite : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(sign | absolute);
}

WEFT_ALWAYS_INLINE void store(float value, float& out) { out = value; }
WEFT_ALWAYS_INLINE void store(double value, double& out) { out = value; }

WEFT_ALWAYS_INLINE void store(float value, BFloat16& out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const uint32_t absolute = bits & 0x7FFFFFFFU;
  out.bits = static_cast<uint16_t>(absolute > 0x7F800000U ? 0x7FC0U : nearest);
}

WEFT_ALWAYS_INLINE void store(float value, Float16& out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t absolute = bits & 0x7FFFFFFFU;
  // Normal results: rebias the exponent and round to nearest even in one addition.
  const uint32_t normal = (absolute - 0x38000000U + 0xFFFU + ((absolute >> 13) & 1U)) >> 13;
  // Subnormal results: adding 0.5 leaves the mantissa, in units of 2^-24, in the low bits.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(absolute) + 0.5F) - 0x3F000000U;
  const uint32_t finite = absolute < 0x38800000U ? subnormal : normal;
  const uint32_t not_finite = absolute > 0x7F800000U ? 0x7E00U : 0x7C00U;
  // 0x477FF000 is 65520, halfway between the largest float16 and the next power of two.
  out.bits = static_cast<uint16_t>(sign | (absolute >= 0x477FF000U ? not_finite : finite));
}

}  // namespace
}  // namespace weft::kernels::cpu

#undef WEFT_ALWAYS_INLINE
