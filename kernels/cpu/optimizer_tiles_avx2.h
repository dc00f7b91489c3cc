#pragma once

#include "optimizer_formats_avx2.h"
#include "optimizer_tiles.h"

#include <cstdint>

// The loops of optimizer_tiles.h in AVX2. Internal linkage throughout: see polynomial_math.h.
//
// The formula of Adam is two loops, because square roots and divisions take so long that in a
// single loop the processor runs out of instructions that do not wait for one. The first loop
// writes the moments and the roots, the second one the parameter.
namespace weft::kernels::cpu {
namespace {

template <typename Weight>
C10_ALWAYS_INLINE Reals load_weight(const typename Weight::Value* parameter,
                                    [[maybe_unused]] const typename Weight::Low* low,
                                    int64_t i) {
  if constexpr (Weight::kIsSplit) {
    return load_split(parameter + i, low + i);
  } else {
    return load(parameter + i);
  }
}

template <typename Weight>
C10_ALWAYS_INLINE void store_weight(const Reals& x,
                                    typename Weight::Value* parameter,
                                    [[maybe_unused]] typename Weight::Low* low,
                                    int64_t i) {
  if constexpr (Weight::kIsSplit) {
    store_split(x, parameter + i, low + i);
  } else {
    store_nearest(x, parameter + i);
  }
}

// Prefetches what is read after this. With split floats, a block reads short ranges of four or five
// arrays, which the processor's own prefetching follows with gaps; other formats gain nothing. An
// address outside of the arrays has no effect.
C10_ALWAYS_INLINE void prefetch_after(const void* data) {
  constexpr int64_t kBytesAhead = 1024;
  _mm_prefetch(static_cast<const char*>(data) + kBytesAhead, _MM_HINT_T0);
}

// The largest of numbers by their bits, compared as unsigned: of magnitudes or of numbers that are
// not negative, where a NaN of either sign is the largest.
class Largest {
 public:
  C10_ALWAYS_INLINE void add(const Words& bits) {
    largest_ = words([](__m256i a, __m256i b) { return _mm256_max_epu32(a, b); }, largest_, bits);
  }

  C10_ALWAYS_INLINE int32_t magnitude() const {
    const __m256i all = _mm256_max_epu32(largest_.front, largest_.back);
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0b01'00'11'10));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0b10'11'00'01));
    return detail::magnitude(static_cast<uint32_t>(_mm_cvtsi128_si32(x)));
  }

 private:
  Words largest_ = broadcast(0U);
};

// Whether a step has none of the rare options, and the constants of such a step, which the compiler
// then knows: that saves a multiplication and branches.
C10_ALWAYS_INLINE bool is_usual(const detail::AdamConstants& constants) {
  return constants.grad_sign > 0 && constants.starts_at_grad == 0;
}
C10_ALWAYS_INLINE void set_usual(detail::AdamConstants& constants) {
  constants.grad_sign = 1;
  constants.starts_at_grad = 0;
}
C10_ALWAYS_INLINE bool is_usual(const detail::MomentumConstants& constants) {
  return constants.grad_sign > 0 && constants.nesterov == 0 && constants.is_first == 0;
}
C10_ALWAYS_INLINE void set_usual(detail::MomentumConstants& constants) {
  constants.grad_sign = 1;
  constants.nesterov = 0;
  constants.is_first = 0;
}

struct Avx2Tiles {
  template <typename Variant>
  static FormulaTile<Variant>* formula_of(const typename Variant::Constants& constants) {
    if (is_usual(constants)) {
      return constants.grad_decay != 0 ? formula<Variant, true, true>
                                       : formula<Variant, false, true>;
    }
    return constants.grad_decay != 0 ? formula<Variant, true, false>
                                     : formula<Variant, false, false>;
  }

  template <typename Variant, bool kDecaysGrad, bool kIsUsual>
  C10_NOINLINE static void formula(const typename Variant::Constants& given,
                                   typename Variant::Weight::Value* __restrict parameter,
                                   typename Variant::Weight::Low* __restrict low,
                                   const typename Variant::Grad* __restrict grad,
                                   typename Variant::First::Value* __restrict first,
                                   float first_step,
                                   float* __restrict new_first,
                                   typename Variant::Second::Value* __restrict second,
                                   float second_step,
                                   float* __restrict new_second,
                                   int64_t num_vectors,
                                   LargestStates& largest) {
    using Weight = typename Variant::Weight;
    typename Variant::Constants constants = given;
    if constexpr (kIsUsual) set_usual(constants);
    const int64_t size = num_vectors * kVectorSize;
    // float32 states are stepped in place. The roots of second moments in bfloat16 are not kept.
    float* exact_first = new_first;
    float* exact_second = new_second;
    float* roots = new_second;
    alignas(32) float temporary[Variant::kRounds && !Variant::kHasCodes ? detail::kCodeBlock : 1];
    if constexpr (!Variant::kRounds) {
      exact_first = first;
      exact_second = second;
    } else if constexpr (!Variant::kHasCodes) {
      roots = temporary;
    }
    Largest largest_first;
    Largest largest_second;
    for (int64_t i = 0; i < size; i += kSixteen) {
      if constexpr (Weight::kIsSplit) {
        prefetch_after(parameter + i);
        prefetch_after(low + i);
        prefetch_after(grad + i);
        prefetch_after(first + i);
        if constexpr (Variant::kHasSecond) prefetch_after(second + i);
      }
      const Reals g = load(grad + i);
      Reals m = load_state(first + i, first_step);
      [[maybe_unused]] Reals p{};
      if constexpr (kDecaysGrad || !Variant::kHasSecond) p = load_weight<Weight>(parameter, low, i);
      if constexpr (Variant::kHasSecond) {
        Reals v = load_state(second + i, second_step);
        detail::adam_moments<kDecaysGrad>(constants, p, g, m, v);
        if constexpr (Variant::kHasCodes) {
          largest_second.add(bits_of(v));
        } else {
          store(v, exact_second + i);
        }
        store(square_root(v), roots + i);
      } else {
        p = detail::momentum_element<kDecaysGrad>(constants, p, g, m);
        store_weight<Weight>(p, parameter, low, i);
      }
      if constexpr (Variant::kHasCodes) largest_first.add(magnitude(bits_of(m)));
      store(m, exact_first + i);
    }
    largest = {largest_first.magnitude(), largest_second.magnitude()};
    if constexpr (Variant::kHasSecond) {
      for (int64_t i = 0; i < size; i += kSixteen) {
        const Reals p = load_weight<Weight>(parameter, low, i);
        const Reals m = load(exact_first + i);
        store_weight<Weight>(
            detail::adam_parameter(constants, p, m, load(roots + i)), parameter, low, i);
      }
    }
  }

  template <detail::StateFormat kStates, bool kHasSecond>
  C10_NOINLINE static void round(const float* __restrict new_first,
                                 float first_factor,
                                 typename StateAccess<kStates, false>::Value* __restrict first,
                                 const float* __restrict new_second,
                                 float second_factor,
                                 typename StateAccess<kStates, true>::Value* __restrict second,
                                 uint32_t position,
                                 detail::LowerKey key,
                                 int64_t num_vectors) {
    constexpr bool kHasCodes = kStates == detail::StateFormat::kCodes;
    Words positions = broadcast(position) + Words{_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                  _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
    // Computes the new states of the elements from `begin` on.
    const auto next = [&](int64_t begin, Words& next_first, Words& next_second) {
      const RandomUnits units(positions, key);
      positions = positions + broadcast(uint32_t{kSixteen});
      const Reals m = load(new_first + begin);
      if constexpr (kHasCodes) {
        next_first = signed_code(m, first_factor, units.first);
      } else {
        next_first = rounded(m, units.first);
      }
      if constexpr (kHasSecond) {
        const Reals v = load(new_second + begin);
        if constexpr (kHasCodes) {
          next_second = unsigned_code(v, second_factor, units.second);
        } else {
          next_second = rounded(v, units.second);
        }
      }
    };
    for (int64_t i = 0; i < num_vectors * kVectorSize; i += 2 * kSixteen) {
      Words first_states[2];
      Words second_states[2];
      next(i, first_states[0], second_states[0]);
      next(i + kSixteen, first_states[1], second_states[1]);
      store_states(first_states[0], first_states[1], first + i);
      if constexpr (kHasSecond) store_states(second_states[0], second_states[1], second + i);
    }
  }
};

}  // namespace
}  // namespace weft::kernels::cpu
