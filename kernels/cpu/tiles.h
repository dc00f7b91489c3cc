#pragma once

#include <weft/kernels/half_types.h>

#include <c10/macros/Macros.h>

#include <cstdint>
#include <type_traits>

// Reads and writes the arrays of the jobs that the *_loops.h files run, with the instruction set
// this file is compiled for. Internal linkage throughout: see polynomial_math.h.
//
// Work proceeds in tiles of up to kTileSize elements: operands are converted into small buffers of
// the compute type (`Scalar`: double for double, else float), the formula runs over the buffers,
// and results are rounded into the output. float and double arrays are read and written in place.
// The loop of a formula thus serves every storage type.
namespace weft::kernels::cpu {
namespace {

constexpr int64_t kTileSize = 512;

template <typename Storage>
using ScalarOf = std::conditional_t<std::is_same_v<Storage, double>, double, float>;

// Reads an operand in the compute type.
template <typename Storage>
class TileReader {
 public:
  using Scalar = ScalarOf<Storage>;

  explicit TileReader(const void* data) : data_(static_cast<const Storage*>(data)) {}

  // Returns elements [begin, begin + size) of the array, at most kTileSize; valid until the next
  // call.
  const Scalar* read(int64_t begin, int64_t size) {
    const Storage* source = data_ + begin;
    if constexpr (std::is_same_v<Storage, Scalar>) {
      return source;
    } else {
      convert(source, size);
      return buffer_;
    }
  }

 private:
  void convert(const Storage* __restrict source, int64_t size) {
    for (int64_t i = 0; i < size; ++i) buffer_[i] = load(source[i]);
  }

  const Storage* data_;
  alignas(64) Scalar buffer_[std::is_same_v<Storage, Scalar> ? 1 : kTileSize];
};

// Writes results: start_tile() returns memory for up to kTileSize results in the compute type, from
// element `begin` of the array on; finish_tile() stores the first `size` of them into the array.
template <typename Storage>
class TileWriter {
 public:
  using Scalar = ScalarOf<Storage>;

  explicit TileWriter(void* data) : data_(static_cast<Storage*>(data)) {}

  Scalar* start_tile(int64_t begin) {
    if constexpr (std::is_same_v<Storage, Scalar>) {
      return data_ + begin;
    } else {
      return buffer_;
    }
  }

  void finish_tile(int64_t begin, int64_t size) {
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
