#pragma once

#include "optimizer_math.h"
#include "optimizer_step_job.h"

#include <c10/macros/Macros.h>

#include <cstdint>
#include <type_traits>

// The formats of the tensors of an optimizer step, one element at a time. Internal linkage
// throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

template <detail::WeightFormat kFormat>
struct WeightAccess {
  using Format = detail::WeightFormat;
  using Value = std::conditional_t<kFormat == Format::kFloat32, float, uint16_t>;
  using Low = std::conditional_t<kFormat == Format::kSplit8, int8_t, int16_t>;
  static constexpr bool kIsSplit = kFormat == Format::kSplit16 || kFormat == Format::kSplit8;
  static constexpr bool kIsNarrow = kFormat == Format::kSplit8;

  C10_ALWAYS_INLINE static float load(Value value, [[maybe_unused]] Low low) {
    if constexpr (kFormat == Format::kFloat32) {
      return value;
    } else if constexpr (kFormat == Format::kBFloat16) {
      return detail::from_bfloat16(value);
    } else {
      return detail::join(value, kIsNarrow ? low * 256 : low);
    }
  }

  C10_ALWAYS_INLINE static void store(float x, Value& value, [[maybe_unused]] Low& low) {
    if constexpr (kFormat == Format::kFloat32) {
      value = x;
    } else if constexpr (kFormat == Format::kBFloat16) {
      value = detail::to_bfloat16_nearest(x);
    } else {
      const detail::SplitFloat split = detail::split(x, kIsNarrow);
      value = split.high;
      low = static_cast<Low>(kIsNarrow ? split.low >> 8 : split.low);
    }
  }
};

C10_ALWAYS_INLINE float load_grad(float value) { return value; }
C10_ALWAYS_INLINE float load_grad(uint16_t value) { return detail::from_bfloat16(value); }

// kIsSecond: the second moment, whose codes are unsigned and made of its square root.
template <detail::StateFormat kFormat, bool kIsSecond>
struct StateAccess {
  using Format = detail::StateFormat;
  using Code = std::conditional_t<kIsSecond, uint8_t, int8_t>;
  using Value =
      std::conditional_t<kFormat == Format::kFloat32,
                         float,
                         std::conditional_t<kFormat == Format::kBFloat16, uint16_t, Code>>;
  static constexpr float kLargestCode = detail::kLargestCode<kIsSecond>;

  C10_ALWAYS_INLINE static float load(Value value, [[maybe_unused]] float code_step) {
    if constexpr (kFormat == Format::kFloat32) {
      return value;
    } else if constexpr (kFormat == Format::kBFloat16) {
      return detail::from_bfloat16(value);
    } else if constexpr (kIsSecond) {
      return detail::from_unsigned_code(value, code_step);
    } else {
      return detail::from_signed_code(value, code_step);
    }
  }

  // REQUIRES: the format is not float32. For codes of a second moment, x is its square root.
  C10_ALWAYS_INLINE static Value rounded(float x,
                                         [[maybe_unused]] float code_factor,
                                         uint32_t random) {
    const int32_t units = detail::random_units<kIsSecond>(random);
    if constexpr (kFormat == Format::kBFloat16) {
      return detail::to_bfloat16_stochastic(x, units);
    } else {
      const float u = static_cast<float>(units) * 0x1p-16F;
      return static_cast<Value>(kIsSecond ? detail::unsigned_code(x, code_factor, u)
                                          : detail::signed_code(x, code_factor, u));
    }
  }
};

// One combination of a formula and formats.
template <typename JobType,
          detail::WeightFormat kWeights,
          typename GradValue,
          detail::StateFormat kStates>
struct OptimizerVariant {
  using Job = JobType;
  using Constants = decltype(Job::constants);
  using Weight = WeightAccess<kWeights>;
  using Grad = GradValue;
  using First = StateAccess<kStates, false>;
  using Second = StateAccess<kStates, true>;
  static constexpr detail::StateFormat kStateFormat = kStates;
  static constexpr bool kHasSecond = std::is_same_v<Job, detail::AdamStepJob>;
  static constexpr bool kHasCodes = kStates == detail::StateFormat::kCodes;
  static constexpr bool kRounds = kStates != detail::StateFormat::kFloat32;
};

}  // namespace
}  // namespace weft::kernels::cpu
