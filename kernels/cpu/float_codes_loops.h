#pragma once

#include "block_access.h"
#include "float_codes_job.h"

#include <cstdint>

// Runs the conversions of float_codes_job.h with the instruction set this file is compiled for.
// Internal linkage throughout: see polynomial_math.h.
namespace weft::kernels::cpu {
namespace {

// Returns the largest magnitude.
C10_NOINLINE int32_t magnitude_tile(const float* __restrict x, int64_t num_vectors) {
  int32_t largest = 0;
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const int32_t magnitude = detail::magnitude(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

C10_NOINLINE void root_tile(const float* __restrict x,
                            int64_t num_vectors,
                            float* __restrict roots) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) roots[i] = std::sqrt(x[i]);
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
      split_tile(x.read(block), block.num_vectors, high.target(block), low.target(block));
      high.finish(block);
      low.finish(block);
    } else {
      join_tile(high.read(block), low.read(block), block.num_vectors, x.target(block));
      x.finish(block);
    }
  });
}

template <typename Code>
void run_quantize(const detail::FloatCodesJob& job, int64_t first, int64_t last) {
  constexpr bool kIsRoot = std::is_unsigned_v<Code>;
  BlockArray<float> x(job.x);
  BlockArray<Code> codes(job.codes);
  alignas(64) float roots[detail::kCodeBlock];
  alignas(64) uint32_t halves[detail::kCodeBlock];  // rounds to nearest: adds 1/2
  for (uint32_t& each : halves) each = 0x80008000U;
  for_each_block(job, first, last, [&](const Block& block) {
    if (job.op == detail::FloatCodesOp::kQuantize) {
      const float* values = x.read(block);
      const float scale = detail::scale_of(magnitude_tile(values, block.num_vectors));
      job.scales[block.idx] = scale;
      if constexpr (kIsRoot) {
        root_tile(values, block.num_vectors, roots);
        values = roots;
      }
      to_codes_tile<kIsRoot>(values, scale, halves, block.num_vectors, codes.target(block));
      codes.finish(block);
    } else {
      from_codes_tile(codes.read(block), job.scales[block.idx], block.num_vectors, x.target(block));
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
