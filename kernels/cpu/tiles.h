#pragma once

#include <weft/kernels/half_types.h>

#include <c10/macros/Macros.h>

#include <cstdint>
#include <type_traits>

// Reads and writes arrays for the loops, with the instruction set this file is compiled for.
// Internal linkage throughout: see polynomial_math.h.
//
// Work proceeds in tiles of up to kTileSize elements: operands are converted into small buffers and
// their bias is added, the formula runs over the buffers, and results are rounded into the output.
// float and double arrays without bias are read and written in place. One loop per formula thus
// serves every storage type, with and without bias.
namespace weft::kernels::cpu {
namespace {

constexpr int64_t kTileSize = 512;

template <typename Storage>
using ScalarOf = std::conditional_t<std::is_same_v<Storage, double>, double, float>;

// Reads an operand as scalars and adds its bias.
template <typename Storage>
class TileReader {
 public:
  using Scalar = ScalarOf<Storage>;

  TileReader(const void* data, const void* bias, int64_t row_size)
      : data_(static_cast<const Storage*>(data)),
        bias_(static_cast<const Storage*>(bias)),
        row_size_(row_size) {}

  // Returns elements [begin, begin + size) of the array; valid until the next call.
  const Scalar* read(int64_t begin, int64_t size) {
    const Storage* source = data_ + begin;
    if (bias_ == nullptr) {
      if constexpr (std::is_same_v<Storage, Scalar>) return source;
      convert(source, size);
      return buffer_;
    }
    int64_t column = begin % row_size_;
    for (int64_t done = 0; done < size;) {
      const int64_t left_in_row = row_size_ - column;
      const int64_t count = left_in_row < size - done ? left_in_row : size - done;
      add_bias(source + done, bias_ + column, buffer_ + done, count);
      done += count;
      column = 0;
    }
    return buffer_;
  }

 private:
  void convert(const Storage* __restrict source, int64_t size) {
    for (int64_t i = 0; i < size; ++i) buffer_[i] = load(source[i]);
  }

  static void add_bias(const Storage* __restrict source,
                       const Storage* __restrict bias,
                       Scalar* __restrict sum,
                       int64_t size) {
    for (int64_t i = 0; i < size; ++i) sum[i] = load(source[i]) + load(bias[i]);
  }

  const Storage* data_;
  const Storage* bias_;
  int64_t row_size_;
  alignas(64) Scalar buffer_[kTileSize];
};

// Writes results: begin() returns the memory to write scalars to, finish() stores them.
template <typename Storage>
class TileWriter {
 public:
  using Scalar = ScalarOf<Storage>;

  explicit TileWriter(void* data) : data_(static_cast<Storage*>(data)) {}

  Scalar* begin(int64_t begin) {
    if constexpr (std::is_same_v<Storage, Scalar>) {
      return data_ + begin;
    } else {
      return buffer_;
    }
  }

  void finish(int64_t begin, int64_t size) {
    if constexpr (!std::is_same_v<Storage, Scalar>) {
      Storage* __restrict target = data_ + begin;
      for (int64_t i = 0; i < size; ++i) store(buffer_[i], target[i]);
    }
  }

 private:
  Storage* data_;
  alignas(64) Scalar buffer_[std::is_same_v<Storage, Scalar> ? 1 : kTileSize];
};

// Calls tile(begin, size) for consecutive tiles of [begin, end).
template <typename Tile>
void for_each_tile(int64_t begin, int64_t end, const Tile& tile) {
  for (; begin < end; begin += kTileSize) {
    tile(begin, end - begin < kTileSize ? end - begin : kTileSize);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu
