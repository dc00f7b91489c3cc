#pragma once

#include "vector_access.cuh"

#include <bit>
#include <cstdint>

// The packs of a row that one thread of a block processes: pack threadIdx.x + i * blockDim.x for
// i = 0, 1, ...
namespace weft::kernels::cuda {

// Calls visit(i, pack) for each pack of the thread. REQUIRES: with kPacks > 0, the row has at most
// kPacks * blockDim.x packs.
template <int kPacks, typename Visit>
__device__ __forceinline__ void for_each_pack(int64_t num_packs, const Visit& visit) {
  if constexpr (kPacks > 0) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = static_cast<int>(threadIdx.x + i * blockDim.x);
      if (pack < num_packs) visit(i, int64_t{pack});
    }
  } else {
    for (int64_t pack = threadIdx.x; pack < num_packs; pack += blockDim.x) visit(0, pack);
  }
}

// With kPacks > 0, keeps the packs of a row in registers; all their loads are in flight at once.
// With kPacks = 0, stores nothing, and get() reads from memory.
template <typename Storage, int kWidth, int kPacks>
class KeptPacks {
 public:
  // `begin` is the index of the row's first element in `data`.
  __device__ __forceinline__ void load(const void* data, int64_t begin, int64_t num_packs) {
    if constexpr (kPacks > 0) {
      for_each_pack<kPacks>(num_packs, [&](int i, int64_t pack) {
        packs_[i] = *reinterpret_cast<const Words*>(static_cast<const Storage*>(data) + begin +
                                                    pack * kWidth);
      });
    }
  }

  // Unpacks the thread's pack i, whose first element in `data` is `begin`.
  template <typename Scalar>
  __device__ __forceinline__ void get(int i,
                                      const void* data,
                                      int64_t begin,
                                      Scalar (&out)[kWidth]) const {
    if constexpr (kPacks > 0) {
      const auto pack = std::bit_cast<Pack<Storage, kWidth>>(packs_[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) out[j] = static_cast<Scalar>(pack.values[j]);
    } else {
      load_pack<Storage>(data, begin, out);
    }
  }

  // Replaces the kept pack i.
  template <typename Scalar>
  __device__ __forceinline__ void set(int i, const Scalar (&values)[kWidth]) {
    if constexpr (kPacks > 0) {
      Pack<Storage, kWidth> pack;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) pack.values[j] = static_cast<Storage>(values[j]);
      packs_[i] = std::bit_cast<Words>(pack);
    }
  }

 private:
  static_assert(kPacks == 0 || sizeof(Storage) * kWidth == kVectorBytes);

  // Words of 32 bits, because the compiler copies an array of half-type elements one by one.
  struct alignas(kVectorBytes) Words {
    uint32_t values[kVectorBytes / sizeof(uint32_t)];
  };

  Words packs_[kPacks > 0 ? kPacks : 1];
};

}  // namespace weft::kernels::cuda
