#pragma once

#include "activation_math.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

// exp and the normal distribution as straight-line arithmetic that the compiler can vectorise:
// no table, no branch, no library call. Errors are a few units in the last place.
//
// Everything here, in tiles.h and in the *_loops.h files has internal linkage. The files that
// include these headers are compiled for different instruction sets, and with external linkage the
// linker would keep one copy of each function, perhaps one that the running processor cannot
// execute.
namespace weft::kernels::cpu {
namespace {

template <typename Scalar>
struct PolynomialConstants;

template <>
struct PolynomialConstants<float> {
  using Bits = int32_t;  // signed: SSE2 and AVX2 have no unsigned comparison
  static constexpr Bits kSignBit = INT32_MIN;
  static constexpr int kMantissaBits = 23;
  static constexpr float kExponentBias = 127.0F;
  static constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kExpZero = -104.0F;      // exp is 0 below
  static constexpr float kExpInfinite = 89.0F;    // exp is infinite above
  // ln 2 in two parts; a small integer times the first part is exact.
  static constexpr float kLn2High = 0.693359375F;
  static constexpr float kLn2Low = -2.12194440054690583e-4F;
  // (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2; relative error of exp 1.0e-8.
  static constexpr float kExp[] = {0.5F,
                                   0.1666657702559798819F,
                                   0.041666554662050533982F,
                                   0.0083631730745137109028F,
                                   0.0013926176119935578884F};
  // Mask of a number's high bits: the square of a number that has only these is exact.
  static constexpr Bits kHighHalf = ~Bits{0xFFF};
  static constexpr float kNormalLimit = 15.0F;  // the pdf is 0 beyond
  static constexpr float kMillsCenter = 4.0F;
  // Relative error 2.3e-8; see normal().
  static constexpr float kMills[] = {0.75528512121297372228F,
                                     -0.60789647327261314123F,
                                     0.38713780634484054973F,
                                     -0.18652562654249299948F,
                                     0.060393795198436674888F,
                                     -0.0075167549053766592407F,
                                     -0.0034733096847909944404F,
                                     0.0015706828906199014037F,
                                     0.00012768286857052466624F,
                                     -0.0001607627685665886083F};
};

template <>
struct PolynomialConstants<double> {
  using Bits = int64_t;
  static constexpr Bits kSignBit = INT64_MIN;
  static constexpr int kMantissaBits = 52;
  static constexpr double kExponentBias = 1023.0;
  static constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kExpZero = -746.0;
  static constexpr double kExpInfinite = 710.0;
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  // Relative error of exp 1.7e-17.
  static constexpr double kExp[] = {0.50000000000000010211,
                                    0.16666666666666667452,
                                    0.041666666666624161903,
                                    0.0083333333333300644495,
                                    0.0013888888917196719077,
                                    0.00019841269863040545271,
                                    0.000024801521322368693266,
                                    2.7557268480310025526e-6,
                                    2.7620075879983366586e-7,
                                    2.5100375832561233664e-8};
  static constexpr Bits kHighHalf = ~Bits{0x7FFFFFF};
  static constexpr double kNormalLimit = 39.0;
  static constexpr double kMillsCenter = 5.0;
  // Relative error 1.3e-17.
  static constexpr double kMills[] = {
      0.76919304975006295804,     -0.66538250289005669366,     0.49530561596997658874,
      -0.31353315667130517141,    0.16502036617037502528,      -0.069118638706294679525,
      0.020795066800091459633,    -0.0029933767706492681155,   -0.00079786940073924878713,
      0.00054489906503732301149,  -0.000059375713816471311811, -0.00004976281037790303534,
      0.000016681160364586645435, 3.9808712856669724865e-6,    -2.7691457822822778648e-6,
      -3.3651220434990695011e-7,  4.3298370374156094057e-7,    4.2091833338869145819e-8,
      -6.5848868400797397181e-8,  -9.1445020812891738596e-9,   7.6672361072026533149e-9,
      1.6891057665153780829e-9,   -1.8073212078146043403e-10};
};

// Horner's rule as a fold: a loop over the terms would hide the outer loop from the vectoriser.
template <typename Scalar, std::size_t kTerms, std::size_t... kStep>
C10_ALWAYS_INLINE Scalar horner(const Scalar (&coefficients)[kTerms],
                                Scalar x,
                                std::index_sequence<kStep...> /*steps*/) {
  Scalar sum = coefficients[kTerms - 1];
  ((sum = sum * x + coefficients[kTerms - 2 - kStep]), ...);
  return sum;
}

template <typename Scalar, std::size_t kTerms>
C10_ALWAYS_INLINE Scalar polynomial(const Scalar (&coefficients)[kTerms], Scalar x) {
  return horner(coefficients, x, std::make_index_sequence<kTerms - 1>{});
}

// Implements the `Math` of activation_math.h.
template <typename ScalarType>
struct PolynomialMath {
  using Scalar = ScalarType;
  using Constants = PolynomialConstants<Scalar>;
  using Bits = typename Constants::Bits;

  // NaN, infinity, overflow and underflow give what std::exp gives.
  C10_ALWAYS_INLINE static Scalar exp(Scalar x) {
    // A NaN passes both selections.
    const Scalar floored = x < Constants::kExpZero ? Constants::kExpZero : x;
    const Scalar bounded = floored > Constants::kExpInfinite ? Constants::kExpInfinite : floored;
    return exp_of_sum(bounded, Scalar(0));
  }

  // With a = |x| and c = kMillsCenter, the upper tail is pdf(a) times the Mills ratio m(a). kMills
  // approximates m(a) * (a + c) / sqrt(2 pi), a smooth function of t = (a - c) / (a + c).
  // Both tails keep their relative accuracy, unlike 1 + erf.
  C10_ALWAYS_INLINE static detail::NormalPoint<Scalar> normal(Scalar x) {
    constexpr Scalar kInverseSqrtTwoPi = Scalar(0.39894228040143267793994605993438);
    // min(|x|, limit), on the bits: the compiler turns selections on floating-point numbers into
    // branches. NaN becomes the limit; the results of activation_math.h are still NaN, because its
    // formulae multiply by x itself.
    const auto distance = static_cast<Bits>(std::bit_cast<Bits>(x) & ~Constants::kSignBit);
    constexpr auto kLimit = std::bit_cast<Bits>(Constants::kNormalLimit);
    const Scalar a = std::bit_cast<Scalar>(distance < kLimit ? distance : kLimit);
    // exp would magnify the rounding error of a * a, so the square is the sum of two terms.
    const Scalar high =
        std::bit_cast<Scalar>(static_cast<Bits>(std::bit_cast<Bits>(a) & Constants::kHighHalf));
    const Scalar density =
        exp_of_sum(Scalar(-0.5) * high * high, Scalar(-0.5) * (a - high) * (a + high));
    const Scalar inverse = Scalar(1) / (a + Constants::kMillsCenter);
    const Scalar t = (a - Constants::kMillsCenter) * inverse;
    const Scalar tail = density * (polynomial(Constants::kMills, t) * inverse);
    return {x > Scalar(0) ? Scalar(1) - tail : tail, density * kInverseSqrtTwoPi};
  }

 private:
  // Returns exp(high + low). `low` is 0 or much smaller than `high` in magnitude.
  // REQUIRES: `high` is between kExpZero and kExpInfinite, or a little below kExpZero, where the
  // result is 0.
  C10_ALWAYS_INLINE static Scalar exp_of_sum(Scalar high, Scalar low) {
    constexpr Scalar kLog2E = Scalar(1.4426950408889634073599246810019);
    const Scalar exponent = round_to_integer((high + low) * kLog2E);
    const Scalar r =
        ((high - exponent * Constants::kLn2High) - exponent * Constants::kLn2Low) + low;
    const Scalar power = Scalar(1) + (r + r * r * polynomial(Constants::kExp, r));
    // Multiplied in two steps, because 2^exponent may be outside of the normal numbers.
    const Scalar half_exponent = round_to_integer(exponent * Scalar(0.5));
    return power * power_of_two(half_exponent) * power_of_two(exponent - half_exponent);
  }

  C10_ALWAYS_INLINE static Scalar round_to_integer(Scalar x) {
    return (x + Constants::kRounder) - Constants::kRounder;
  }

  // The low bits of kRounder + n are those of the integer n. `exponent` is integral.
  C10_ALWAYS_INLINE static Scalar power_of_two(Scalar exponent) {
    const Bits biased =
        std::bit_cast<Bits>(exponent + (Constants::kRounder + Constants::kExponentBias));
    return std::bit_cast<Scalar>(static_cast<Bits>(biased << Constants::kMantissaBits));
  }
};

}  // namespace
}  // namespace weft::kernels::cpu
