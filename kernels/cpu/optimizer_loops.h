#pragma once

#include "block_access.h"
#include "optimizer_variant.h"

#include <cstdint>
#include <cstring>

// Runs the optimizer steps with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h.
//
// A block is stepped by two loops while it is in the L1 cache: the formula, which writes the
// parameter and the exact new states, and the rounding of the states, which needs the block's
// largest magnitude. float32 states need only the first.
namespace weft::kernels::cpu {
namespace {

// The largest magnitudes of the new states of a block.
struct LargestStates {
  int32_t first = 0;
  int32_t second = 0;
};

// Steps a block. The new states are written to `new_first` and `new_second`, float32 states in
// place; of second moments that get codes, the square roots are written. `first_step` and
// `second_step`: see code_step() in low_precision.h.
template <typename Variant, bool kDecaysGrad>
C10_NOINLINE void formula_tile(const typename Variant::Constants& given,
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

// Rounds the new states of a block by the random numbers of the positions from `position` on, whose
// upper half is that of `key`.
template <detail::StateFormat kStates, bool kHasSecond>
C10_NOINLINE void round_tile(const float* __restrict new_first,
                             float first_factor,
                             typename StateAccess<kStates, false>::Value* __restrict first,
                             const float* __restrict new_second,
                             float second_factor,
                             typename StateAccess<kStates, true>::Value* __restrict second,
                             uint32_t position,
                             detail::RandomKey key,
                             int64_t num_vectors) {
  const auto size = static_cast<int32_t>(num_vectors * kVectorSize);
  for (int32_t i = 0; i < size; ++i) {
    const uint32_t random = detail::mix(position + static_cast<uint32_t>(i), key);
    first[i] = StateAccess<kStates, false>::rounded(new_first[i], first_factor, random);
    if constexpr (kHasSecond) {
      second[i] = StateAccess<kStates, true>::rounded(new_second[i], second_factor, random);
    }
  }
}

// Stores the scale of new states, and returns the factor of their codes. Replaces states that are
// not finite by 0, because a conversion of NaN to an integer is undefined.
template <typename State>
float set_scale(int32_t largest, float& scale, float* states) {
  scale = detail::scale_of(largest);
  if (scale != scale) std::memset(states, 0, detail::kCodeBlock * sizeof(float));
  return detail::code_factor(scale, State::kLargestCode);
}

template <typename Variant>
class OptimizerLoop {
 public:
  explicit OptimizerLoop(const typename Variant::Job& job)
      : job_(job),
        parameter_(job.parameter),
        low_(job.low_bits),
        grad_(const_cast<void*>(job.grad)),
        first_(job.first.values),
        second_(job.second.values) {}

  // Runs blocks [first, last).
  void run(int64_t first, int64_t last) {
    const int64_t blocks_per_row = job_.blocks_per_row();
    int64_t row = first / blocks_per_row;
    int64_t column = first % blocks_per_row * detail::kCodeBlock;
    for (int64_t idx = first; idx < last; ++idx) {
      const Block block(idx, row * job_.row_size + column, job_.row_size - column);
      const LargestStates largest = step(block);
      if constexpr (Variant::kRounds) round(block, largest, position(row, column));
      first_.finish(block);
      if constexpr (Variant::kHasSecond) second_.finish(block);
      column += detail::kCodeBlock;
      if (column >= job_.row_size) {
        column = 0;
        ++row;
      }
    }
  }

 private:
  using First = typename Variant::First;
  using Second = typename Variant::Second;

  uint64_t position(int64_t row, int64_t column) const {
    const auto full_row = static_cast<uint64_t>(job_.row + row);
    return full_row * static_cast<uint64_t>(job_.full_columns) +
           static_cast<uint64_t>(job_.column + column);
  }

  LargestStates step(const Block& block) {
    typename Variant::Weight::Low* low = nullptr;
    typename Second::Value* second = nullptr;
    float first_step = 0;
    float second_step = 0;
    if constexpr (Variant::Weight::kIsSplit) low = low_.read(block);
    if constexpr (Variant::kHasSecond) second = second_.read(block);
    if constexpr (Variant::kHasCodes) {
      first_step = detail::code_step(job_.first.scales[block.idx], First::kLargestCode);
      if constexpr (Variant::kHasSecond) {
        second_step = detail::code_step(job_.second.scales[block.idx], Second::kLargestCode);
      }
    }
    const auto tile =
        job_.constants.grad_decay != 0 ? formula_tile<Variant, true> : formula_tile<Variant, false>;
    LargestStates largest;
    tile(job_.constants,
         parameter_.read(block),
         low,
         grad_.read(block),
         first_.read(block),
         first_step,
         new_first_,
         second,
         second_step,
         new_second_,
         block.num_vectors,
         largest);
    parameter_.finish(block);
    if constexpr (Variant::Weight::kIsSplit) low_.finish(block);
    return largest;
  }

  void round(const Block& block, const LargestStates& largest, uint64_t position) {
    float first_factor = 0;
    float second_factor = 0;
    if constexpr (Variant::kHasCodes) {
      first_factor = set_scale<First>(largest.first, job_.first.scales[block.idx], new_first_);
      if constexpr (Variant::kHasSecond) {
        second_factor =
            set_scale<Second>(largest.second, job_.second.scales[block.idx], new_second_);
      }
    }
    const auto lower = static_cast<uint32_t>(position);
    const auto upper = static_cast<uint32_t>(position >> 32);
    const auto round_with =
        [&](uint32_t upper_half, typename First::Value* first, typename Second::Value* second) {
          round_tile<Variant::kStateFormat, Variant::kHasSecond>(
              new_first_,
              first_factor,
              first,
              new_second_,
              second_factor,
              second,
              lower,
              detail::random_key(job_.seed, job_.step, upper_half),
              block.num_vectors);
        };
    typename First::Value* first = first_.target(block);
    typename Second::Value* second = nullptr;
    if constexpr (Variant::kHasSecond) second = second_.target(block);
    round_with(upper, first, second);
    // The lower half of the position passes 2^32 within few blocks.
    const uint64_t rest = (uint64_t{1} << 32) - lower;
    if (rest >= static_cast<uint64_t>(block.size)) return;
    typename First::Value next_first[detail::kCodeBlock];
    typename Second::Value next_second[detail::kCodeBlock];
    round_with(upper + 1, next_first, next_second);
    for (auto i = static_cast<int64_t>(rest); i < block.size; ++i) {
      first[i] = next_first[i];
      if constexpr (Variant::kHasSecond) second[i] = next_second[i];
    }
  }

  const typename Variant::Job& job_;
  BlockArray<typename Variant::Weight::Value> parameter_;
  BlockArray<typename Variant::Weight::Low> low_;
  BlockArray<typename Variant::Grad> grad_;
  BlockArray<typename First::Value> first_;
  BlockArray<typename Second::Value> second_;
  alignas(64) float new_first_[detail::kCodeBlock];
  alignas(64) float new_second_[detail::kCodeBlock];
};

template <detail::WeightFormat kWeights, typename Grad, typename Job>
void run_with_states(const Job& job, int64_t first, int64_t last) {
  using Format = detail::StateFormat;
  switch (job.state_format) {
    case Format::kFloat32:
      return OptimizerLoop<OptimizerVariant<Job, kWeights, Grad, Format::kFloat32>>(job).run(first,
                                                                                             last);
    case Format::kBFloat16:
      return OptimizerLoop<OptimizerVariant<Job, kWeights, Grad, Format::kBFloat16>>(job).run(first,
                                                                                              last);
    case Format::kCodes:
      return OptimizerLoop<OptimizerVariant<Job, kWeights, Grad, Format::kCodes>>(job).run(first,
                                                                                           last);
  }
}

template <detail::WeightFormat kWeights, typename Job>
void run_with_grads(const Job& job, int64_t first, int64_t last) {
  if constexpr (kWeights != detail::WeightFormat::kFloat32) {
    if (job.has_bfloat16_grad) return run_with_states<kWeights, uint16_t>(job, first, last);
  }
  run_with_states<kWeights, float>(job, first, last);
}

template <typename Job>
void run_optimizer_loops(const Job& job, int64_t first, int64_t last) {
  switch (job.weight_format) {
    case detail::WeightFormat::kFloat32:
      return run_with_grads<detail::WeightFormat::kFloat32>(job, first, last);
    case detail::WeightFormat::kBFloat16:
      return run_with_grads<detail::WeightFormat::kBFloat16>(job, first, last);
    case detail::WeightFormat::kSplit16:
      return run_with_grads<detail::WeightFormat::kSplit16>(job, first, last);
    case detail::WeightFormat::kSplit8:
      return run_with_grads<detail::WeightFormat::kSplit8>(job, first, last);
  }
}

// This function and the next one run blocks [first, last) of the job.
void run_adam_loops(const detail::AdamStepJob& job, int64_t first, int64_t last) {
  run_optimizer_loops(job, first, last);
}

void run_momentum_loops(const detail::MomentumStepJob& job, int64_t first, int64_t last) {
  run_optimizer_loops(job, first, last);
}

}  // namespace
}  // namespace weft::kernels::cpu
