#pragma once

#include "block_access.h"
#include "optimizer_tiles.h"

#include <cstdint>
#include <cstring>

// Runs the optimizer steps with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h.
//
// A block is stepped by two loops while it is in the L1 cache: the formula, which writes the
// parameter and the exact new states, and the rounding of the states, which needs the block's
// largest magnitude. float32 states need only the first. `Tiles` supplies both: see
// optimizer_tiles.h.
namespace weft::kernels::cpu {
namespace {

// Stores the scale of new states, and returns the factor of their codes. Replaces states that are
// not finite by 0, because a conversion of NaN to an integer is undefined.
template <typename State>
float set_scale(int32_t largest, float& scale, float* states) {
  scale = detail::scale_of(largest);
  if (scale != scale) std::memset(states, 0, detail::kCodeBlock * sizeof(float));
  return detail::code_factor(scale, State::kLargestCode);
}

template <typename Variant, typename Tiles>
class OptimizerLoop {
 public:
  explicit OptimizerLoop(const typename Variant::Job& job)
      : job_(job),
        formula_(Tiles::template formula_of<Variant>(job.constants)),
        key_(detail::random_key(job.seed, job.step, 0)),
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

  // Returns the key of the positions whose upper 48 bits are `upper_bits`.
  detail::LowerKey key_of(uint64_t upper_bits) {
    const auto upper_word = static_cast<uint32_t>(upper_bits >> 16);
    if (upper_word != key_word_) {
      key_word_ = upper_word;
      key_ = detail::random_key(job_.seed, job_.step, upper_word);
    }
    return detail::lower_key(key_, static_cast<uint32_t>(upper_bits & 0xFFFFU));
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
    LargestStates largest;
    formula_(job_.constants,
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
    const auto lower = static_cast<uint32_t>(position & 0xFFFFU);
    const uint64_t upper = position >> 16;
    const auto round_with = [&](uint64_t upper_bits,
                                uint32_t lower_bits,
                                typename First::Value* first,
                                typename Second::Value* second) {
      Tiles::template round<Variant::kStateFormat, Variant::kHasSecond>(new_first_,
                                                                        first_factor,
                                                                        first,
                                                                        new_second_,
                                                                        second_factor,
                                                                        second,
                                                                        lower_bits,
                                                                        key_of(upper_bits),
                                                                        block.num_vectors);
    };
    typename First::Value* first = first_.target(block);
    typename Second::Value* second = nullptr;
    if constexpr (Variant::kHasSecond) second = second_.target(block);
    round_with(upper, lower, first, second);
    // The lower bits of the positions pass 2^16 within few blocks.
    constexpr uint32_t kLowerEnd = uint32_t{1} << 16;
    const uint32_t rest = kLowerEnd - lower;
    if (rest >= block.size) return;
    typename First::Value next_first[detail::kCodeBlock];
    typename Second::Value next_second[detail::kCodeBlock];
    round_with(upper + 1, lower - kLowerEnd, next_first, next_second);
    for (int64_t i = rest; i < block.size; ++i) {
      first[i] = next_first[i];
      if constexpr (Variant::kHasSecond) second[i] = next_second[i];
    }
  }

  const typename Variant::Job& job_;
  FormulaTile<Variant>* formula_;
  uint32_t key_word_ = 0;  // the upper half of the positions of key_
  detail::RandomKey key_;
  BlockArray<typename Variant::Weight::Value> parameter_;
  BlockArray<typename Variant::Weight::Low> low_;
  BlockArray<typename Variant::Grad> grad_;
  BlockArray<typename First::Value> first_;
  BlockArray<typename Second::Value> second_;
  alignas(64) float new_first_[detail::kCodeBlock];
  alignas(64) float new_second_[detail::kCodeBlock];
};

template <typename Tiles, detail::WeightFormat kWeights, typename Grad, typename Job>
void run_with_states(const Job& job, int64_t first, int64_t last) {
  using Format = detail::StateFormat;
  const auto run = [&]<Format kStates>() {
    OptimizerLoop<OptimizerVariant<Job, kWeights, Grad, kStates>, Tiles>(job).run(first, last);
  };
  switch (job.state_format) {
    case Format::kFloat32:
      return run.template operator()<Format::kFloat32>();
    case Format::kBFloat16:
      return run.template operator()<Format::kBFloat16>();
    case Format::kCodes:
      return run.template operator()<Format::kCodes>();
  }
}

template <typename Tiles, detail::WeightFormat kWeights, typename Job>
void run_with_grads(const Job& job, int64_t first, int64_t last) {
  if constexpr (kWeights != detail::WeightFormat::kFloat32) {
    if (job.has_bfloat16_grad) return run_with_states<Tiles, kWeights, uint16_t>(job, first, last);
  }
  run_with_states<Tiles, kWeights, float>(job, first, last);
}

template <typename Tiles, typename Job>
void run_optimizer_loops(const Job& job, int64_t first, int64_t last) {
  switch (job.weight_format) {
    case detail::WeightFormat::kFloat32:
      return run_with_grads<Tiles, detail::WeightFormat::kFloat32>(job, first, last);
    case detail::WeightFormat::kBFloat16:
      return run_with_grads<Tiles, detail::WeightFormat::kBFloat16>(job, first, last);
    case detail::WeightFormat::kSplit16:
      return run_with_grads<Tiles, detail::WeightFormat::kSplit16>(job, first, last);
    case detail::WeightFormat::kSplit8:
      return run_with_grads<Tiles, detail::WeightFormat::kSplit8>(job, first, last);
  }
}

// This function and the next one run blocks [first, last) of the job.
template <typename Tiles>
void run_adam_loops(const detail::AdamStepJob& job, int64_t first, int64_t last) {
  run_optimizer_loops<Tiles>(job, first, last);
}

template <typename Tiles>
void run_momentum_loops(const detail::MomentumStepJob& job, int64_t first, int64_t last) {
  run_optimizer_loops<Tiles>(job, first, last);
}

}  // namespace
}  // namespace weft::kernels::cpu
