#pragma once

#include "block_access.h"
#include "optimizer_math.h"
#include "optimizer_step_job.h"

#include <cstdint>
#include <type_traits>

// Runs the optimizer steps with the instruction set this file is compiled for. Internal linkage
// throughout: see polynomial_math.h.
//
// Each block passes through the loops below while it is in the L1 cache: the operands are converted
// to float32 buffers, the formula runs over the buffers, and the results are rounded into the
// tensors. float32 tensors are read and written in place.
namespace weft::kernels::cpu {
namespace {

// The largest magnitudes of the new moments of a block.
struct LargestMoments {
  int32_t first = 0;
  int32_t second = 0;
};

// Steps a block in place. With kCodes, `exp_avg_sq` receives the square roots of the second
// moments, which their codes are made of.
template <bool kDecaysGrad, bool kCodes>
C10_NOINLINE void adam_tile(const detail::AdamConstants& given,
                            float* __restrict parameter,
                            const float* __restrict grad,
                            float* __restrict exp_avg,
                            float* __restrict exp_avg_sq,
                            int64_t num_vectors,
                            LargestMoments& largest) {
  const detail::AdamConstants constants = given;
  int32_t largest_first = 0;
  int32_t largest_second = 0;
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    float root = 0;
    parameter[i] = detail::adam_element<kDecaysGrad>(constants, parameter[i], grad[i], m, v, root);
    exp_avg[i] = m;
    exp_avg_sq[i] = kCodes ? root : v;
    if constexpr (kCodes) {
      const int32_t first = detail::magnitude(m);
      const int32_t second = detail::magnitude(v);
      largest_first = first > largest_first ? first : largest_first;
      largest_second = second > largest_second ? second : largest_second;
    }
  }
  largest = {largest_first, largest_second};
}

template <bool kDecaysGrad, bool kCodes>
C10_NOINLINE void momentum_tile(const detail::MomentumConstants& given,
                                float* __restrict parameter,
                                const float* __restrict grad,
                                float* __restrict momentum,
                                int64_t num_vectors,
                                LargestMoments& largest) {
  const detail::MomentumConstants constants = given;
  int32_t largest_first = 0;
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    float m = momentum[i];
    parameter[i] = detail::momentum_element<kDecaysGrad>(constants, parameter[i], grad[i], m);
    momentum[i] = m;
    if constexpr (kCodes) {
      const int32_t first = detail::magnitude(m);
      largest_first = first > largest_first ? first : largest_first;
    }
  }
  largest = {largest_first, 0};
}

// Steps a block in place; `second` is null for a momentum step.
template <typename Job>
using Tile = void (*)(const Job& job,
                      float* parameter,
                      const float* grad,
                      float* first,
                      float* second,
                      int64_t num_vectors,
                      LargestMoments& largest);

template <bool kDecaysGrad, bool kCodes>
void formula_tile(const detail::AdamStepJob& job,
                  float* parameter,
                  const float* grad,
                  float* first,
                  float* second,
                  int64_t num_vectors,
                  LargestMoments& largest) {
  adam_tile<kDecaysGrad, kCodes>(
      job.constants, parameter, grad, first, second, num_vectors, largest);
}

template <bool kDecaysGrad, bool kCodes>
void formula_tile(const detail::MomentumStepJob& job,
                  float* parameter,
                  const float* grad,
                  float* first,
                  float* /*second*/,
                  int64_t num_vectors,
                  LargestMoments& largest) {
  momentum_tile<kDecaysGrad, kCodes>(job.constants, parameter, grad, first, num_vectors, largest);
}

// Writes the random bits of the elements from `position` on to random[0 .. num_vectors).
C10_NOINLINE void random_tile(const detail::OptimizerStepJob& job,
                              uint64_t position,
                              int64_t num_vectors,
                              uint32_t* __restrict random) {
  const int64_t size = num_vectors * kVectorSize;
  const auto lower = static_cast<uint32_t>(position);
  const auto upper = static_cast<uint32_t>(position >> 32);
  const auto key = detail::random_key(job.seed, job.step, upper);
  for (int64_t i = 0; i < size; ++i) random[i] = detail::mix(lower + static_cast<uint32_t>(i), key);
  // The lower half passes 2^32 within few blocks.
  const uint64_t before = (uint64_t{1} << 32) - lower;
  if (before < static_cast<uint64_t>(size)) {
    const auto next = detail::random_key(job.seed, job.step, upper + 1);
    for (auto i = static_cast<int64_t>(before); i < size; ++i) {
      random[i] = detail::mix(lower + static_cast<uint32_t>(i), next);
    }
  }
}

// The float32 values of the blocks of a parameter.
template <detail::WeightFormat kFormat>
class Weights {
 public:
  explicit Weights(const detail::OptimizerStepJob& job)
      : values_(job.parameter), low_(job.low_bits) {}

  float* read(const Block& block) {
    if constexpr (kIsFloat32) {
      return values_.read(block);
    } else {
      const uint16_t* high = values_.read(block);
      if constexpr (kFormat == Format::kBFloat16) {
        from_bfloat16_tile(high, block.num_vectors, buffer_);
      } else {
        join_tile(high, low_.read(block), block.num_vectors, buffer_);
      }
      return buffer_;
    }
  }

  void write(const Block& block) {
    if constexpr (kFormat == Format::kBFloat16) {
      to_bfloat16_tile(buffer_, block.num_vectors, values_.target(block));
    } else if constexpr (!kIsFloat32) {
      split_tile(buffer_, block.num_vectors, values_.target(block), low_.target(block));
      low_.finish(block);
    }
    values_.finish(block);
  }

 private:
  using Format = detail::WeightFormat;
  static constexpr bool kIsFloat32 = kFormat == Format::kFloat32;
  using Value = std::conditional_t<kIsFloat32, float, uint16_t>;
  using Low = std::conditional_t<kFormat == Format::kSplit8, int8_t, int16_t>;

  BlockArray<Value> values_;
  BlockArray<Low> low_;
  alignas(64) float buffer_[detail::kCodeBlock];
};

// The float32 values of the blocks of a gradient.
template <typename Value>
class Grads {
 public:
  explicit Grads(const void* values) : values_(const_cast<void*>(values)) {}

  const float* read(const Block& block) {
    const Value* values = values_.read(block);
    if constexpr (std::is_same_v<Value, float>) {
      return values;
    } else {
      from_bfloat16_tile(values, block.num_vectors, buffer_);
      return buffer_;
    }
  }

 private:
  BlockArray<Value> values_;
  alignas(64) float buffer_[std::is_same_v<Value, float> ? 1 : detail::kCodeBlock];
};

// The float32 values of the blocks of a state. kIsSecond: codes are unsigned, and write() gets
// square roots; the random bits are the upper ones.
template <detail::StateFormat kFormat, bool kIsSecond>
class States {
 public:
  explicit States(const detail::StateArray& state) : values_(state.values), scales_(state.scales) {}

  float* read(const Block& block) {
    auto* values = values_.read(block);
    if constexpr (kFormat == Format::kFloat32) {
      return values;
    } else {
      if constexpr (kFormat == Format::kBFloat16) {
        from_bfloat16_tile(values, block.num_vectors, buffer_);
      } else {
        from_codes_tile(values, scales_[block.idx], block.num_vectors, buffer_);
      }
      return buffer_;
    }
  }

  void write(const Block& block, const uint32_t* random, int32_t largest) {
    if constexpr (kFormat == Format::kBFloat16) {
      to_bfloat16_stochastic_tile<kIsSecond>(
          buffer_, random, block.num_vectors, values_.target(block));
    } else if constexpr (kFormat == Format::kCodes) {
      const float scale = detail::scale_of(largest);
      scales_[block.idx] = scale;
      to_codes_tile<kIsSecond>(buffer_, scale, random, block.num_vectors, values_.target(block));
    }
    values_.finish(block);
  }

 private:
  using Format = detail::StateFormat;
  using Code = std::conditional_t<kIsSecond, uint8_t, int8_t>;
  using Value =
      std::conditional_t<kFormat == Format::kFloat32,
                         float,
                         std::conditional_t<kFormat == Format::kBFloat16, uint16_t, Code>>;

  BlockArray<Value> values_;
  float* scales_;
  alignas(64) float buffer_[kFormat == Format::kFloat32 ? 1 : detail::kCodeBlock];
};

template <detail::WeightFormat kWeights, typename Grad, detail::StateFormat kStates, typename Job>
void run_optimizer_step(const Job& job, int64_t first_block, int64_t last_block) {
  constexpr bool kHasSecond = std::is_same_v<Job, detail::AdamStepJob>;
  constexpr bool kCodes = kStates == detail::StateFormat::kCodes;
  constexpr bool kRounds = kStates != detail::StateFormat::kFloat32;
  Weights<kWeights> weights(job);
  Grads<Grad> grads(job.grad);
  States<kStates, false> first(job.first);
  States<kStates, true> second(job.second);
  Tile<Job> tile = formula_tile<false, kCodes>;
  if (job.constants.grad_decay != 0) tile = formula_tile<true, kCodes>;
  alignas(64) uint32_t random[detail::kCodeBlock];
  const int64_t blocks_per_row = job.blocks_per_row();
  int64_t row = first_block / blocks_per_row;
  int64_t column = first_block % blocks_per_row * detail::kCodeBlock;
  for (int64_t idx = first_block; idx < last_block; ++idx) {
    const Block block(idx, row * job.row_size + column, job.row_size - column);
    float* second_values = nullptr;
    if constexpr (kHasSecond) second_values = second.read(block);
    LargestMoments largest;
    float* parameters = weights.read(block);
    tile(job,
         parameters,
         grads.read(block),
         first.read(block),
         second_values,
         block.num_vectors,
         largest);
    if constexpr (kRounds) {
      const auto position =
          static_cast<uint64_t>(job.row + row) * static_cast<uint64_t>(job.full_columns) +
          static_cast<uint64_t>(job.column + column);
      random_tile(job, position, block.num_vectors, random);
    }
    weights.write(block);
    first.write(block, random, largest.first);
    if constexpr (kHasSecond) second.write(block, random, largest.second);
    column += detail::kCodeBlock;
    if (column >= job.row_size) {
      column = 0;
      ++row;
    }
  }
}

template <detail::WeightFormat kWeights, typename Grad, typename Job>
void run_with_states(const Job& job, int64_t first, int64_t last) {
  switch (job.state_format) {
    case detail::StateFormat::kFloat32:
      return run_optimizer_step<kWeights, Grad, detail::StateFormat::kFloat32>(job, first, last);
    case detail::StateFormat::kBFloat16:
      return run_optimizer_step<kWeights, Grad, detail::StateFormat::kBFloat16>(job, first, last);
    case detail::StateFormat::kCodes:
      return run_optimizer_step<kWeights, Grad, detail::StateFormat::kCodes>(job, first, last);
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
