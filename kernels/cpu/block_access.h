#pragma once

#include "low_precision.h"

#include <cstdint>
#include <cstring>

// Reads and writes blocks of up to kCodeBlock elements, and converts between their formats and
// float32, with the instruction set this file is compiled for. Internal linkage throughout: see
// polynomial_math.h.
//
// Loops run over vectors of kVectorSize elements, so that no element is computed by the remainder
// of a vectorised loop, whose fused multiply-adds may differ: results do not depend on the place of
// an element in its block, nor on the block's size. Blocks of another size pass through buffers
// that are filled up with zeros.
namespace weft::kernels::cpu {
namespace {

constexpr int64_t kVectorSize = 64;

struct Block {
  Block(int64_t block_idx, int64_t first_element, int64_t elements_left)
      : idx(block_idx),
        begin(first_element),
        size(elements_left < detail::kCodeBlock ? elements_left : detail::kCodeBlock),
        num_vectors((size + kVectorSize - 1) / kVectorSize) {}

  bool is_full() const { return size == num_vectors * kVectorSize; }

  int64_t idx;          // in the matrix, row by row
  int64_t begin;        // index of its first element
  int64_t size;         // in elements
  int64_t num_vectors;  // of kVectorSize elements
};

// The blocks of an array.
template <typename Element>
class BlockArray {
 public:
  explicit BlockArray(void* data) : data_(static_cast<Element*>(data)) {}

  // Returns the elements of a block, filled up with zeros. They are the array's own if the block is
  // full.
  Element* read(const Block& block) {
    Element* source = data_ + block.begin;
    if (block.is_full()) return source;
    std::memset(buffer_, 0, sizeof buffer_);
    std::memcpy(buffer_, source, static_cast<std::size_t>(block.size) * sizeof(Element));
    return buffer_;
  }

  // Returns memory for the new elements of a block, which finish() copies to the array.
  Element* target(const Block& block) { return block.is_full() ? data_ + block.begin : buffer_; }

  void finish(const Block& block) {
    if (block.is_full()) return;
    std::memcpy(
        data_ + block.begin, buffer_, static_cast<std::size_t>(block.size) * sizeof(Element));
  }

 private:
  Element* data_;
  alignas(64) Element buffer_[detail::kCodeBlock];
};

C10_NOINLINE void from_bfloat16_tile(const uint16_t* __restrict values,
                                     int64_t num_vectors,
                                     float* __restrict x) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) x[i] = detail::from_bfloat16(values[i]);
}

C10_NOINLINE void to_bfloat16_tile(const float* __restrict x,
                                   int64_t num_vectors,
                                   uint16_t* __restrict values) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    values[i] = detail::to_bfloat16_nearest(x[i]);
  }
}

// kUpper: uses the upper half of the random bits.
template <bool kUpper>
C10_NOINLINE void to_bfloat16_stochastic_tile(const float* __restrict x,
                                              const uint32_t* __restrict random,
                                              int64_t num_vectors,
                                              uint16_t* __restrict values) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const int32_t units =
        kUpper ? detail::second_random(random[i]) : detail::first_random(random[i]);
    values[i] = detail::to_bfloat16_stochastic(x[i], units);
  }
}

C10_NOINLINE void split_tile(const float* __restrict x,
                             int64_t num_vectors,
                             uint16_t* __restrict high,
                             int16_t* __restrict low) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const detail::SplitFloat value = detail::split(x[i], false);
    high[i] = value.high;
    low[i] = value.low;
  }
}

C10_NOINLINE void split_tile(const float* __restrict x,
                             int64_t num_vectors,
                             uint16_t* __restrict high,
                             int8_t* __restrict low) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const detail::SplitFloat value = detail::split(x[i], true);
    high[i] = value.high;
    low[i] = static_cast<int8_t>(value.low >> 8);
  }
}

C10_NOINLINE void join_tile(const uint16_t* __restrict high,
                            const int16_t* __restrict low,
                            int64_t num_vectors,
                            float* __restrict x) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) x[i] = detail::join(high[i], low[i]);
}

C10_NOINLINE void join_tile(const uint16_t* __restrict high,
                            const int8_t* __restrict low,
                            int64_t num_vectors,
                            float* __restrict x) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    x[i] = detail::join(high[i], low[i] * 256);
  }
}

C10_NOINLINE void from_codes_tile(const int8_t* __restrict codes,
                                  float scale,
                                  int64_t num_vectors,
                                  float* __restrict x) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    x[i] = detail::from_signed_code(codes[i], scale);
  }
}

C10_NOINLINE void from_codes_tile(const uint8_t* __restrict codes,
                                  float scale,
                                  int64_t num_vectors,
                                  float* __restrict x) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    x[i] = detail::from_unsigned_code(codes[i], scale);
  }
}

C10_NOINLINE void to_signed_codes_tile(const float* __restrict x,
                                       float factor,
                                       const uint32_t* __restrict random,
                                       int64_t num_vectors,
                                       int8_t* __restrict codes) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const float u = static_cast<float>(detail::first_random(random[i])) * 0x1p-16F;
    codes[i] = static_cast<int8_t>(detail::signed_code(x[i], factor, u));
  }
}

C10_NOINLINE void to_unsigned_codes_tile(const float* __restrict roots,
                                         float factor,
                                         const uint32_t* __restrict random,
                                         int64_t num_vectors,
                                         uint8_t* __restrict codes) {
  for (int64_t i = 0; i < num_vectors * kVectorSize; ++i) {
    const float u = static_cast<float>(detail::second_random(random[i])) * 0x1p-16F;
    codes[i] = static_cast<uint8_t>(detail::unsigned_code(roots[i], factor, u));
  }
}

// Writes the signed codes of numbers x or, if kIsRoot, the unsigned codes of the squares of x.
template <bool kIsRoot, typename Code>
C10_ALWAYS_INLINE void to_codes_tile(
    const float* x, float scale, const uint32_t* random, int64_t num_vectors, Code* codes) {
  if constexpr (kIsRoot) {
    const float factor = detail::code_factor(scale, detail::kUnsignedCodes);
    to_unsigned_codes_tile(x, factor, random, num_vectors, codes);
  } else {
    const float factor = detail::code_factor(scale, detail::kSignedCodes);
    to_signed_codes_tile(x, factor, random, num_vectors, codes);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
