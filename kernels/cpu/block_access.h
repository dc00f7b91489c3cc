#pragma once

#include "low_precision.h"

#include <cstdint>
#include <cstring>

// Reads and writes blocks of up to kCodeBlock elements, with the instruction set this file is
// compiled for. Internal linkage throughout: see polynomial_math.h.
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

}  // namespace
}  // namespace weft::kernels::cpu
