#pragma once

#include "block_access.h"
#include "optimizer_variant.h"

#include <cstdint>

// The formula and the rounding of a block of an optimizer step, as loops that the compiler
// vectorises; optimizer_tiles_avx2.h has the same functions with the same bits. Internal linkage
// throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

// The largest magnitudes of the new states of a block.
struct LargestStates {
  int32_t first = 0;
  int32_t second = 0;
};

// The type of formula() below.
template <typename Variant>
using FormulaTile = void(const typename Variant::Constants& given,
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
                         LargestStates& largest);

struct ElementTiles {
  // Returns the formula() for these constants.
  template <typename Variant>
  static FormulaTile<Variant>* formula_of(const typename Variant::Constants& constants) {
    return constants.grad_decay != 0 ? formula<Variant, true> : formula<Variant, false>;
  }

  // Steps a block. The new states are written to `new_first` and `new_second`, float32 states in
  // place; of second moments that get codes, the square roots are written. `first_step` and
  // `second_step`: see code_step() in low_precision.h.
  template <typename Variant, bool kDecaysGrad>
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
    const typename Variant::Constants constants = given;
    typename Weight::Low no_low = 0;
    int32_t largest_first = 0;
    int32_t largest_second = 0;
    for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
      const float before = Weight::load(parameter[i], Weight::kIsSplit ? low[i] : no_low);
      const float g = load_grad(grad[i]);
      float m = Variant::First::load(first[i], first_step);
      float after = 0;
      if constexpr (Variant::kHasSecond) {
        float v = Variant::Second::load(second[i], second_step);
        float root = 0;
        after = detail::adam_element<kDecaysGrad>(constants, before, g, m, v, root);
        if constexpr (Variant::kHasCodes) {
          const int32_t magnitude = detail::magnitude(v);
          largest_second = magnitude > largest_second ? magnitude : largest_second;
          new_second[i] = root;
        } else if constexpr (Variant::kRounds) {
          new_second[i] = v;
        } else {
          second[i] = v;
        }
      } else {
        after = detail::momentum_element<kDecaysGrad>(constants, before, g, m);
      }
      if constexpr (Variant::kHasCodes) {
        const int32_t magnitude = detail::magnitude(m);
        largest_first = magnitude > largest_first ? magnitude : largest_first;
      }
      if constexpr (Variant::kRounds) {
        new_first[i] = m;
      } else {
        first[i] = m;
      }
      if constexpr (Weight::kIsSplit) {
        Weight::store(after, parameter[i], low[i]);
      } else {
        Weight::store(after, parameter[i], no_low);
      }
    }
    largest = {largest_first, largest_second};
  }

  // Rounds the new states of a block by the random numbers of the positions from `position` on,
  // whose upper half is that of `key`.
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
    const auto size = static_cast<int32_t>(num_vectors * kVectorSize);
    for (int32_t i = 0; i < size; ++i) {
      const uint32_t word = detail::continue_mix((position + static_cast<uint32_t>(i)) ^ key.begun,
                                                 key.before_second);
      const uint32_t random = word ^ (word >> 16);
      first[i] = StateAccess<kStates, false>::rounded(new_first[i], first_factor, random);
      if constexpr (kHasSecond) {
        second[i] = StateAccess<kStates, true>::rounded(new_second[i], second_factor, random);
      }
    }
  }
};

}  // namespace
}  // namespace weft::kernels::cpu
