#pragma once

#include "low_precision.h"
#include "sixteen_avx2.h"

#include <cstdint>
#include <immintrin.h>
#include <type_traits>

// The formats of an optimizer step in AVX2, sixteen elements at a time and with the bits of
// low_precision.h. Conversions between elements of 8, 16 and 32 bits are most of the instructions
// of a step. A compiler makes about twice as many for them, because it does not know which bits are
// 0, nor that a number cannot saturate. Internal linkage throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

// Exchanges the middle quarters: instructions that pack or unpack treat the halves of a register
// apart, so the quarters 0 and 2 become neighbours of each other.
C10_ALWAYS_INLINE __m256i exchange_middle(__m256i bits) {
  return _mm256_permute4x64_epi64(bits, 0b11'01'10'00);
}

// Returns the words with these sixteen upper and lower halves, whose middle quarters are exchanged.
C10_ALWAYS_INLINE Reals join_halves(__m256i upper, __m256i lower) {
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(lower, upper)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower, upper))};
}

// Parameters and gradients.

C10_ALWAYS_INLINE Reals load(const float* x) {
  return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}

C10_ALWAYS_INLINE Reals load(const uint16_t* bfloat16) {
  return join_halves(exchange_middle(read_bits(bfloat16)), _mm256_setzero_si256());
}

// Puts bytes 0-3, 8-11, 4-7 and 12-15 of each half of a register into the upper bytes of sixteen
// numbers: -1 makes a byte 0.
alignas(32) constexpr int8_t kLowOrder[32] = {-1, 0,  -1, 1,  -1, 2,  -1, 3,  -1, 8,  -1,
                                              9,  -1, 10, -1, 11, -1, 4,  -1, 5,  -1, 6,
                                              -1, 7,  -1, 12, -1, 13, -1, 14, -1, 15};

// Return the lower halves of split floats with the middle quarters exchanged.
C10_ALWAYS_INLINE __m256i load_low(const int16_t* low) { return exchange_middle(read_bits(low)); }
C10_ALWAYS_INLINE __m256i load_low(const int8_t* low) {
  const __m256i bytes =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
  return _mm256_shuffle_epi8(bytes, read_bits(kLowOrder));
}

template <typename Low>
C10_ALWAYS_INLINE Reals load_split(const uint16_t* high, const Low* low) {
  const __m256i lower = load_low(low);
  const __m256i borrow = _mm256_srai_epi16(lower, 15);  // -1 where the lower half is negative
  return join_halves(_mm256_add_epi16(exchange_middle(read_bits(high)), borrow), lower);
}

C10_ALWAYS_INLINE void store(const Reals& x, float* out) {
  _mm256_storeu_ps(out, x.front);
  _mm256_storeu_ps(out + 8, x.back);
}

C10_ALWAYS_INLINE void store_nearest(const Reals& x, float* out) { store(x, out); }

// Stores the upper halves of the words.
C10_ALWAYS_INLINE void store_upper(const Words& x, uint16_t* out) {
  const Words upper = x >> 16;
  write_bits(exchange_middle(_mm256_packus_epi32(upper.front, upper.back)), out);
}

// REQUIRES, here and below: a NaN is quiet, as every result of arithmetic is. Its upper half alone
// is a NaN then.
C10_ALWAYS_INLINE void store_nearest(const Reals& x, uint16_t* out) {
  const Words bits = bits_of(x);
  const Words rounding = broadcast(0x7FFFU) + (bits >> 16 & broadcast(1U));
  store_upper(bits + (rounding & is_number(x)), out);
}

C10_ALWAYS_INLINE void store_low(__m256i low, int16_t* out) { write_bits(low, out); }
C10_ALWAYS_INLINE void store_low(__m256i low, int8_t* out) {
  low = _mm256_srai_epi16(low, 8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
}

// Puts the lower halves of the words in each half of a register before the upper ones.
alignas(32) constexpr int8_t kHalvesOrder[32] = {0,  1,  4,  5,  8,  9, 12, 13, 2,  3, 6,
                                                 7,  10, 11, 14, 15, 0, 1,  4,  5,  8, 9,
                                                 12, 13, 2,  3,  6,  7, 10, 11, 14, 15};

template <typename Low>
C10_ALWAYS_INLINE void store_split(const Reals& x, uint16_t* high, Low* low) {
  const __m256i order = read_bits(kHalvesOrder);
  const Words sorted =
      words([order](__m256i w) { return _mm256_shuffle_epi8(w, order); }, bits_of(x));
  const __m256i upper = _mm256_unpackhi_epi64(sorted.front, sorted.back);
  __m256i lower = _mm256_unpacklo_epi64(sorted.front, sorted.back);
  // The lower half of a NaN becomes 0.
  const __m256i quiet_nan = _mm256_set1_epi16(0x7FC0);
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(upper, quiet_nan), quiet_nan);
  lower = _mm256_andnot_si256(is_nan, lower);
  __m256i kept = lower;
  __m256i is_negative = lower;
  if constexpr (sizeof(Low) == 1) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(lower, 8), _mm256_set1_epi16(1));
    kept = _mm256_add_epi16(lower, _mm256_add_epi16(odd, _mm256_set1_epi16(0x7F)));
    // Rounding may carry out of the lower half, which was negative then.
    is_negative = _mm256_or_si256(lower, kept);
  }
  // The upper half is the larger by 1 where the lower one is negative.
  write_bits(exchange_middle(_mm256_add_epi16(upper, _mm256_srli_epi16(is_negative, 15))), high);
  store_low(exchange_middle(kept), low);
}

// States. `step` and `factor`: see code_step() and code_factor() in low_precision.h.

C10_ALWAYS_INLINE Reals load_state(const float* x, float /*step*/) { return load(x); }
C10_ALWAYS_INLINE Reals load_state(const uint16_t* bfloat16, float /*step*/) {
  return load(bfloat16);
}

C10_ALWAYS_INLINE __m128i eight_bytes(const void* data) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(data));
}

C10_ALWAYS_INLINE Reals load_state(const int8_t* codes, float step) {
  const Words integers = {_mm256_cvtepi8_epi32(eight_bytes(codes)),
                          _mm256_cvtepi8_epi32(eight_bytes(codes + 8))};
  const Reals root = to_reals(integers) * step;
  return root * reals_of(magnitude(bits_of(root)));
}

C10_ALWAYS_INLINE Reals load_state(const uint8_t* codes, float step) {
  const Words integers = {_mm256_cvtepu8_epi32(eight_bytes(codes)),
                          _mm256_cvtepu8_epi32(eight_bytes(codes + 8))};
  const Reals root = to_reals(integers) * step;
  return root * root;
}

// The random units of sixteen elements, of their first and of their second states.
struct RandomUnits {
  C10_ALWAYS_INLINE RandomUnits(const Words& positions, detail::LowerKey key) {
    const Words word = detail::continue_mix(positions ^ broadcast(key.begun), key.before_second);
    second = word >> 16;
    first = (word ^ second) & broadcast(0xFFFFU);
  }

  Words first;
  Words second;
};

// The upper half of the result is x, rounded by random units of 2^-16.
C10_ALWAYS_INLINE Words rounded(const Reals& x, const Words& units) {
  const Words bits = bits_of(x);
  const Words is_finite = words([](__m256i a, __m256i b) { return _mm256_cmpgt_epi32(a, b); },
                                broadcast(static_cast<uint32_t>(detail::kInfinity)),
                                magnitude(bits));
  return bits + (units & is_finite);
}

// root * factor + u. The product of the units and 2^-16 is exact, so fusing it changes no bit.
C10_ALWAYS_INLINE Reals unrounded_code(const Reals& root, float factor, const Words& units) {
  return reals([](__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); },
               to_reals(units),
               broadcast(0x1p-16F),
               root * factor);
}

C10_ALWAYS_INLINE Words signed_code(const Reals& x, float factor, const Words& units) {
  const Words bits = bits_of(x);
  const Reals size = square_root(reals_of(magnitude(bits)));
  // The sign of x: of 0, for which the code is 0 anyway, or of its bits.
  return words([](__m256i a, __m256i b) { return _mm256_sign_epi32(a, b); },
               to_integers(unrounded_code(size, factor, units)),
               bits);
}

C10_ALWAYS_INLINE Words unsigned_code(const Reals& root, float factor, const Words& units) {
  const Words code = to_integers(unrounded_code(root, factor, units));
  const Words least = words(
      [](__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }, bits_of(root), broadcast(1U));
  return words([](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }, code, least);
}

// Store 32 elements.
C10_ALWAYS_INLINE void store_states(const Words& one, const Words& two, uint16_t* out) {
  store_upper(one, out);
  store_upper(two, out + 16);
}

template <typename Code>
C10_ALWAYS_INLINE void store_states(const Words& one, const Words& two, Code* out) {
  const __m256i first = _mm256_packs_epi32(one.front, one.back);
  const __m256i second = _mm256_packs_epi32(two.front, two.back);
  const __m256i packed = std::is_signed_v<Code> ? _mm256_packs_epi16(first, second)
                                                : _mm256_packus_epi16(first, second);
  // Each half of the register has four bytes of each part.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  write_bits(_mm256_permutevar8x32_epi32(packed, order), out);
}

}  // namespace
}  // namespace weft::kernels::cpu
