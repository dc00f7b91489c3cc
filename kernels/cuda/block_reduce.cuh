#pragma once

// Reductions over the threads of a block: shuffles within each warp, then over the warps' results
// in shared memory.
namespace weft::kernels::cuda {

inline constexpr int kWarp = 32;

template <typename Scalar>
__device__ __forceinline__ Scalar shuffle_xor(Scalar value, int offset) {
  return __shfl_xor_sync(0xFFFFFFFFU, value, offset);
}

// Returns the block's values reduced by `combine`, on every thread. `identity` is neutral for
// `combine`; `shared` has kWarp entries. A `Value` that is not a number needs an overload of
// shuffle_xor().
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
  __syncthreads();  // all threads have read the entries of the previous call
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
