#pragma once

#include <c10/macros/Macros.h>

#include <bit>
#include <cmath>
#include <cstdint>

// The low-precision formats of <weft/kernels/float_codes.h> and of optimizer states, one number at
// a time, shared by all devices. All functions are free of branches, so that loops over them
// vectorise, and no conversion to an integer gets a NaN.
//
// Stochastic rounding replaces a value between two neighbours of a format by one of them, with
// probabilities that make the expectation the value: floor(y + u) in units of the format's step,
// for a uniform u in [0, 1), here a multiple of 2^-16.
//
// u is a hash of (seed, step, position), with the element's position in the unsharded tensor, so
// every sharding rounds alike. The hash is the finaliser "lowbias32" of Chris Wellons
// (https://github.com/skeeto/hash-prospector), a bijection of 32-bit words with low bias, on the
// lower half of the position. Seed, step and the upper half make a key of two words, which are
// combined with the word before the first and before the second multiplication: with the first
// alone, two keys would give the same numbers in another order of elements.
namespace weft::kernels::detail {

constexpr int64_t kCodeBlock = 256;  // elements that share a scale
constexpr float kSignedCodes = 127;
constexpr float kUnsignedCodes = 255;
template <bool kIsSecond>  // the second moment, whose codes are unsigned
constexpr float kLargestCode = kIsSecond ? kUnsignedCodes : kSignedCodes;
// Magnitudes, a float32's bits without the sign, are signed integers: SSE2 and AVX2 have no
// comparison of unsigned ones. They are ordered like the numbers, with NaN above infinity.
constexpr int32_t kInfinity = 0x7F800000;
constexpr float kNaN = __builtin_nanf("");

struct RandomKey {
  uint32_t before_first;
  uint32_t before_second;
};

// The two parts of mix(). `Word` is uint32_t, or a vector of them.
template <typename Word>
C10_HOST_DEVICE C10_ALWAYS_INLINE Word begin_mix(Word word, RandomKey key) {
  word ^= key.before_first;
  word ^= word >> 16;
  return word;
}
// mix() is the exclusive or of the result and its upper half.
template <typename Word>
C10_HOST_DEVICE C10_ALWAYS_INLINE Word continue_mix(Word word, uint32_t before_second) {
  word *= 0x7FEB352DU;
  word ^= before_second;
  word ^= word >> 15;
  word *= 0x846CA68BU;
  return word;
}

C10_HOST_DEVICE C10_ALWAYS_INLINE uint32_t mix(uint32_t word, RandomKey key) {
  word = continue_mix(begin_mix(word, key), key.before_second);
  word ^= word >> 16;
  return word;
}

// Returns the key of a step for positions whose upper half is `upper`.
C10_HOST_DEVICE C10_ALWAYS_INLINE RandomKey random_key(uint64_t seed,
                                                       uint64_t step,
                                                       uint32_t upper) {
  const RandomKey seed_key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const uint32_t a = mix(static_cast<uint32_t>(step), seed_key);
  const uint32_t b = mix(static_cast<uint32_t>(step >> 32), {a, seed_key.before_first});
  const uint32_t c = mix(upper, {b, a});
  return {c, mix(b, {a, c})};
}

// The key of words with the same upper half: begin_mix() of such a word is the exclusive or of its
// lower half and `begun`, two operations fewer.
struct LowerKey {
  uint32_t begun;
  uint32_t before_second;
};

// Returns the key of the words with this upper half, of 16 bits.
C10_HOST_DEVICE C10_ALWAYS_INLINE LowerKey lower_key(RandomKey key, uint32_t upper_half) {
  return {begin_mix(upper_half << 16, key), key.before_second};
}

// The u of an element's first or second state, in units of 2^-16.
template <bool kIsSecond>
C10_HOST_DEVICE C10_ALWAYS_INLINE int32_t random_units(uint32_t random) {
  return static_cast<int32_t>(kIsSecond ? random >> 16 : random & 0xFFFFU);
}

C10_HOST_DEVICE C10_ALWAYS_INLINE int32_t magnitude(uint32_t bits) {
  return static_cast<int32_t>(bits & 0x7FFFFFFFU);
}
C10_HOST_DEVICE C10_ALWAYS_INLINE int32_t magnitude(float x) {
  return magnitude(std::bit_cast<uint32_t>(x));
}

// bfloat16: the upper half of a float32.

C10_HOST_DEVICE C10_ALWAYS_INLINE float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// The upper half of a NaN of any payload, made quiet so that it stays a NaN.
C10_HOST_DEVICE C10_ALWAYS_INLINE uint32_t upper_of_nan(uint32_t bits) {
  return (bits >> 16) | 0x40U;
}

C10_HOST_DEVICE C10_ALWAYS_INLINE uint16_t to_bfloat16_nearest(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<uint16_t>(magnitude(bits) > kInfinity ? upper_of_nan(bits) : nearest);
}

// `random` in units of 2^-16; infinity and NaN are kept.
C10_HOST_DEVICE C10_ALWAYS_INLINE uint16_t to_bfloat16_stochastic(float x, int32_t random) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t finite = (bits + static_cast<uint32_t>(random)) >> 16;
  const uint32_t other = magnitude(bits) > kInfinity ? upper_of_nan(bits) : bits >> 16;
  return static_cast<uint16_t>(magnitude(bits) < kInfinity ? finite : other);
}

// Split floats. The bits b of a float32 are (high << 16) + low with high = (b + 2^15) >> 16, which
// is the number rounded to bfloat16 (ties away from zero), and a signed `low`. Negative numbers
// need no other case, because the sign bit is the uppermost. A narrow split keeps 8 bits of low,
// low = 256 * low8, after b is rounded to 24 bits (ties to even).

struct SplitFloat {
  uint16_t high;
  int16_t low;  // a multiple of 256 if narrow
};

C10_HOST_DEVICE C10_ALWAYS_INLINE SplitFloat split(float x, bool is_narrow) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FU + ((bits >> 8) & 1U)) & ~0xFFU;
  const uint32_t number = is_narrow ? rounded : bits;
  // A NaN without lower bits.
  const uint32_t kept = magnitude(bits) > kInfinity ? upper_of_nan(bits) << 16 : number;
  // low = kept - (high << 16) is the lower half of kept as a signed number.
  return {static_cast<uint16_t>((kept + 0x8000U) >> 16), static_cast<int16_t>(kept)};
}

C10_HOST_DEVICE C10_ALWAYS_INLINE float join(uint16_t high, int32_t low) {
  return std::bit_cast<float>((static_cast<uint32_t>(high) << 16) + static_cast<uint32_t>(low));
}

// Codes of a block of numbers x: y = 127 * sqrt(|x| / scale) rounded to an integer, with the sign
// of x; for numbers that are not negative y = 255 * sqrt(x / scale). scale is the block's largest
// magnitude, NaN if the block has a number that is not finite.

C10_HOST_DEVICE C10_ALWAYS_INLINE float scale_of(int32_t largest_magnitude) {
  return largest_magnitude < kInfinity ? std::bit_cast<float>(largest_magnitude) : kNaN;
}

// Returns the factor of sqrt(|x|) in y. 0 for a scale of 0 or NaN. The square root of a scale is at
// least 2^-75, so the factor is finite. It is smaller by 2^-22, more than the rounding errors of y,
// so that no code exceeds the largest one, without a selection.
C10_HOST_DEVICE C10_ALWAYS_INLINE float code_factor(float scale, float largest_code) {
  return scale > 0 ? largest_code * (1 - 0x1p-22F) / std::sqrt(scale) : 0.0F;
}

// Returns the square root of the number with code 1.
C10_HOST_DEVICE C10_ALWAYS_INLINE float code_step(float scale, float largest_code) {
  return std::sqrt(scale) / largest_code;
}

// u: a uniform number in [0, 1), or 0.5 to round to nearest. REQUIRES: x is finite.
C10_HOST_DEVICE C10_ALWAYS_INLINE int32_t signed_code(float x, float factor, float u) {
  const float y = std::sqrt(std::fabs(x)) * factor + u;
  return static_cast<int32_t>(std::copysign(y, x));  // towards zero
}

// `root` is sqrt(x). A positive x gets at least 1: a second moment that is rounded to 0 would make
// m / (sqrt(v) + eps) explode, and rounding up only makes an update smaller.
// REQUIRES: root is finite and not negative.
C10_HOST_DEVICE C10_ALWAYS_INLINE int32_t unsigned_code(float root, float factor, float u) {
  const auto code = static_cast<int32_t>(root * factor + u);
  const int32_t bits = magnitude(root);
  const int32_t least = bits < 1 ? bits : 1;  // 1 unless root is 0
  return code > least ? code : least;
}

C10_HOST_DEVICE C10_ALWAYS_INLINE float from_signed_code(int32_t code, float step) {
  const float root = static_cast<float>(code) * step;
  return root * std::fabs(root);
}

C10_HOST_DEVICE C10_ALWAYS_INLINE float from_unsigned_code(int32_t code, float step) {
  const float root = static_cast<float>(code) * step;
  return root * root;
}

}  // namespace weft::kernels::detail
