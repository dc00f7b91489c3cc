#pragma once

#include "block_access.h"
#include "float_codes_job.h"
#include "optimizer_loops.h"

#include <cstdint>

// Runs the conversions of float_codes_job.h with the instruction set this file is compiled for.
// Internal linkage throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

// Both halves of a random number that is 1/2, which rounds to nearest.
constexpr uint32_t kHalves = 0x80008000U;

template <typename Low>
using SplitAccess = WeightAccess<std::is_same_v<Low, int8_t> ? detail::WeightFormat::kSplit8
                                                             : detail::WeightFormat::kSplit16>;
template <typename Code>
using CodeAccess = StateAccess<detail::StateFormat::kCodes, std::is_unsigned_v<Code>>;

template <typename Low>
C10_NOINLINE void split_tile(const float* __restrict x,
                             uint16_t* __restrict high,
                             Low* __restrict low,
                             int64_t num_vectors) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    SplitAccess<Low>::store(x[i], high[i], low[i]);
  }
}

template <typename Low>
C10_NOINLINE void join_tile(const uint16_t* __restrict high,
                            const Low* __restrict low,
                            float* __restrict x,
                            int64_t num_vectors) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    x[i] = SplitAccess<Low>::load(high[i], low[i]);
  }
}

// Returns the largest magnitude of x. Writes x, or the square roots of positive x, to `values`.
template <bool kIsRoot>
C10_NOINLINE int32_t magnitude_tile(const float* __restrict x,
                                    float* __restrict values,
                                    int64_t num_vectors) {
  int32_t largest = 0;
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const int32_t magnitude = detail::magnitude(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    values[i] = !kIsRoot ? x[i] : x[i] > 0 ? std::sqrt(x[i]) : 0.0F;
  }
  return largest;
}

template <typename Code>
C10_NOINLINE void to_codes_tile(const float* __restrict values,
                                float factor,
                                Code* __restrict codes,
                                int64_t num_vectors) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    codes[i] = CodeAccess<Code>::rounded(values[i], factor, kHalves);
  }
}

template <typename Code>
C10_NOINLINE void from_codes_tile(const Code* __restrict codes,
                                  float step,
                                  float* __restrict x,
                                  int64_t num_vectors) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    x[i] = CodeAccess<Code>::load(codes[i], step);
  }
}

// Calls body(block) for the blocks [first, last) of the job.
template <typename Body>
void for_each_block(const detail::FloatCodesJob& job,
                    int64_t first,
                    int64_t last,
                    const Body& body) {
  const int64_t blocks_per_row = job.blocks_per_row();
  for (int64_t idx = first; idx < last; ++idx) {
    const int64_t row = idx / blocks_per_row;
    const int64_t column = idx % blocks_per_row * detail::kCodeBlock;
    body(Block(idx, row * job.row_size + column, job.row_size - column));
  }
}

template <typename Low>
void run_split(const detail::FloatCodesJob& job, int64_t first, int64_t last) {
  BlockArray<float> x(job.x);
  BlockArray<uint16_t> high(job.codes);
  BlockArray<Low> low(job.low);
  for_each_block(job, first, last, [&](const Block& block) {
    if (job.op == detail::FloatCodesOp::kSplit) {
      split_tile(x.read(block), high.target(block), low.target(block), block.num_vectors);
      high.finish(block);
      low.finish(block);
    } else {
      join_tile(high.read(block), low.read(block), x.target(block), block.num_vectors);
      x.finish(block);
    }
  });
}

template <typename Code>
void run_quantize(const detail::FloatCodesJob& job, int64_t first, int64_t last) {
  using Access = CodeAccess<Code>;
  BlockArray<float> x(job.x);
  BlockArray<Code> codes(job.codes);
  alignas(64) float values[detail::kCodeBlock];
  for_each_block(job, first, last, [&](const Block& block) {
    float& scale = job.scales[block.idx];
    if (job.op == detail::FloatCodesOp::kQuantize) {
      const int32_t largest =
          magnitude_tile<std::is_unsigned_v<Code>>(x.read(block), values, block.num_vectors);
      const float factor = set_scale<Access>(largest, scale, values);
      to_codes_tile(values, factor, codes.target(block), block.num_vectors);
      codes.finish(block);
    } else {
      const float step = detail::code_step(scale, Access::kLargestCode);
      from_codes_tile(codes.read(block), step, x.target(block), block.num_vectors);
      x.finish(block);
    }
  });
}

// Runs blocks [first, last) of the job.
void run_float_codes_loops(const detail::FloatCodesJob& job, int64_t first, int64_t last) {
  switch (job.op) {
    case detail::FloatCodesOp::kSplit:
    case detail::FloatCodesOp::kJoin:
      return job.is_narrow ? run_split<int8_t>(job, first, last)
                           : run_split<int16_t>(job, first, last);
    case detail::FloatCodesOp::kQuantize:
    case detail::FloatCodesOp::kDequantize:
      return job.is_signed ? run_quantize<int8_t>(job, first, last)
                           : run_quantize<uint8_t>(job, first, last);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
