#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
#include <immintrin.h>

// Arithmetic on sixteen numbers in two registers of AVX2, for formulae that are templates. Internal
// linkage throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

constexpr int64_t kSixteen = 16;

// Sixteen numbers or words: elements 0 to 7 and 8 to 15.
struct Reals {
  __m256 front;
  __m256 back;
};
struct Words {
  __m256i front;
  __m256i back;
};

// Apply a function to the front and to the back of each operand.
template <typename Function, typename... Operands>
C10_ALWAYS_INLINE Reals reals(const Function& function, const Operands&... operands) {
  return {function(operands.front...), function(operands.back...)};
}
template <typename Function, typename... Operands>
C10_ALWAYS_INLINE Words words(const Function& function, const Operands&... operands) {
  return {function(operands.front...), function(operands.back...)};
}

C10_ALWAYS_INLINE Reals broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
C10_ALWAYS_INLINE Words broadcast(uint32_t x) {
  const __m256i word = _mm256_set1_epi32(static_cast<int>(x));
  return {word, word};
}

C10_ALWAYS_INLINE Reals operator+(const Reals& a, const Reals& b) {
  return reals([](__m256 x, __m256 y) { return _mm256_add_ps(x, y); }, a, b);
}
C10_ALWAYS_INLINE Reals operator-(const Reals& a, const Reals& b) {
  return reals([](__m256 x, __m256 y) { return _mm256_sub_ps(x, y); }, a, b);
}
C10_ALWAYS_INLINE Reals operator*(const Reals& a, const Reals& b) {
  return reals([](__m256 x, __m256 y) { return _mm256_mul_ps(x, y); }, a, b);
}
C10_ALWAYS_INLINE Reals operator/(const Reals& a, const Reals& b) {
  return reals([](__m256 x, __m256 y) { return _mm256_div_ps(x, y); }, a, b);
}
C10_ALWAYS_INLINE Reals operator+(const Reals& a, float b) { return a + broadcast(b); }
C10_ALWAYS_INLINE Reals operator*(const Reals& a, float b) { return a * broadcast(b); }
C10_ALWAYS_INLINE Reals operator*(float a, const Reals& b) { return broadcast(a) * b; }
C10_ALWAYS_INLINE Reals& operator+=(Reals& a, const Reals& b) { return a = a + b; }
C10_ALWAYS_INLINE Reals square_root(const Reals& a) {
  return reals([](__m256 x) { return _mm256_sqrt_ps(x); }, a);
}

C10_ALWAYS_INLINE Words operator+(const Words& a, const Words& b) {
  return words([](__m256i x, __m256i y) { return _mm256_add_epi32(x, y); }, a, b);
}
C10_ALWAYS_INLINE Words operator*(const Words& a, uint32_t b) {
  return words([](__m256i x, __m256i y) { return _mm256_mullo_epi32(x, y); }, a, broadcast(b));
}
C10_ALWAYS_INLINE Words operator&(const Words& a, const Words& b) {
  return words([](__m256i x, __m256i y) { return _mm256_and_si256(x, y); }, a, b);
}
C10_ALWAYS_INLINE Words operator|(const Words& a, const Words& b) {
  return words([](__m256i x, __m256i y) { return _mm256_or_si256(x, y); }, a, b);
}
C10_ALWAYS_INLINE Words operator^(const Words& a, const Words& b) {
  return words([](__m256i x, __m256i y) { return _mm256_xor_si256(x, y); }, a, b);
}
C10_ALWAYS_INLINE Words operator>>(const Words& a, int bits) {
  return words([bits](__m256i x) { return _mm256_srli_epi32(x, bits); }, a);
}
C10_ALWAYS_INLINE Words& operator^=(Words& a, const Words& b) { return a = a ^ b; }
C10_ALWAYS_INLINE Words& operator^=(Words& a, uint32_t b) { return a = a ^ broadcast(b); }
C10_ALWAYS_INLINE Words& operator*=(Words& a, uint32_t b) { return a = a * b; }

C10_ALWAYS_INLINE Words bits_of(const Reals& a) {
  return words([](__m256 x) { return _mm256_castps_si256(x); }, a);
}
C10_ALWAYS_INLINE Reals reals_of(const Words& a) {
  return reals([](__m256i x) { return _mm256_castsi256_ps(x); }, a);
}
C10_ALWAYS_INLINE Reals to_reals(const Words& integers) {
  return reals([](__m256i x) { return _mm256_cvtepi32_ps(x); }, integers);
}
// Towards zero.
C10_ALWAYS_INLINE Words to_integers(const Reals& a) {
  return words([](__m256 x) { return _mm256_cvttps_epi32(x); }, a);
}

C10_ALWAYS_INLINE Words magnitude(const Words& a) { return a & broadcast(0x7FFFFFFFU); }

// All bits where x is a number, none where it is NaN.
C10_ALWAYS_INLINE Words is_number(const Reals& a) {
  return bits_of(reals([](__m256 x) { return _mm256_cmp_ps(x, x, _CMP_ORD_Q); }, a));
}

C10_ALWAYS_INLINE __m256i read_bits(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}

C10_ALWAYS_INLINE void write_bits(__m256i bits, void* data) {
  _mm256_storeu_si256(static_cast<__m256i*>(data), bits);
}

}  // namespace
}  // namespace weft::kernels::cpu
