#pragma once

#include <cstdint>
#include <type_traits>

// Loads and stores of packs of array elements; one instruction moves up to 16 bytes.
namespace weft::kernels::cuda {

inline constexpr int kVectorBytes = 16;

// The compute type of a storage type.
template <typename Storage>
using ScalarOf = std::conditional_t<std::is_same_v<Storage, double>, double, float>;

template <typename Storage, int kWidth>
struct alignas(sizeof(Storage) * kWidth) Pack {
  Storage values[kWidth];
};

// Load and store elements [begin, begin + kWidth). REQUIRES: the address of element `begin` is a
// multiple of the pack's size.
template <typename Storage, typename Scalar, int kWidth>
__device__ __forceinline__ void load_pack(const void* data, int64_t begin, Scalar (&out)[kWidth]) {
  const auto pack =
      *reinterpret_cast<const Pack<Storage, kWidth>*>(static_cast<const Storage*>(data) + begin);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = static_cast<Scalar>(pack.values[i]);
}

template <typename Storage, typename Scalar, int kWidth>
__device__ __forceinline__ void store_pack(void* data,
                                           int64_t begin,
                                           const Scalar (&values)[kWidth]) {
  Pack<Storage, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.values[i] = static_cast<Storage>(values[i]);
  *reinterpret_cast<Pack<Storage, kWidth>*>(static_cast<Storage*>(data) + begin) = pack;
}

}  // namespace weft::kernels::cuda
