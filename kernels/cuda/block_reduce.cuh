#pragma once

// What all threads of a block have, made one value.
namespace weft::kernels::cuda {

inline constexpr int kWarp = 32;

template <typename Scalar>
__device__ __forceinline__ Scalar shuffle_xor(Scalar value, int offset) {
  return __shfl_xor_sync(0xFFFFFFFFU, value, offset);
}

// combine(combine(...), ...) over the block, on every thread. A `Value` that is no number brings a
// shuffle_xor() of its own. `shared` has kWarp entries; nothing changes with `identity`.
// REQUIRES: blockDim.x is a multiple of kWarp; all threads call.
template <typename Value, typename Combine>
__device__ __forceinline__ Value
block_reduce(Value value, Value identity, const Combine& combine, Value* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, shuffle_xor(value, offset));
  }
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  if (num_warps == 1) return value;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  __syncthreads();  // the entries of the call before have been read
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  Value total = lane < num_warps ? shared[lane] : identity;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    total = combine(total, shuffle_xor(total, offset));
  }
  return total;
}

template <typename Scalar>
__device__ __forceinline__ Scalar block_sum(Scalar value, Scalar* shared) {
  return block_reduce(
      value, Scalar(0), [](Scalar a, Scalar b) { return a + b; }, shared);
}

}  // namespace weft::kernels::cuda
