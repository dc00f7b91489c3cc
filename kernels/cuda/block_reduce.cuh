#pragma once

// Reductions over the threads of a block: each warp reduces its values by shuffles and writes the
// result to shared memory, from which each warp then reduces the results of all warps.
namespace weft::kernels::cuda {

inline constexpr int kWarpSize = 32;

template <typename Scalar>
__device__ __forceinline__ Scalar shuffle_xor(Scalar value, int offset) {
  return __shfl_xor_sync(0xFFFFFFFFU, value, offset);
}

// Returns the block's values reduced by `combine`, on every thread. `identity` is neutral for
// `combine`; `shared` is shared memory for kWarpSize values. A `Value` that is not a number needs
// an overload of shuffle_xor().
// REQUIRES: all threads of the block call; the block is one-dimensional and its size is a multiple
// of kWarpSize.
template <typename Value, typename Combine>
__device__ __forceinline__ Value
block_reduce(Value value, Value identity, const Combine& combine, Value* shared) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = combine(value, shuffle_xor(value, offset));
  }
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  if (num_warps == 1) return value;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  __syncthreads();  // until all threads have read the results of the previous call
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  Value total = lane < num_warps ? shared[lane] : identity;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    total = combine(total, shuffle_xor(total, offset));
  }
  return total;
}

template <typename Scalar>
__device__ __forceinline__ Scalar block_sum(Scalar value, Scalar* shared) {
  return block_reduce(
      value, Scalar(0), [](Scalar a, Scalar b) { return a + b; }, shared);
}

// Two values that are reduced together, with the barriers of one reduction.
template <typename Scalar>
struct Pair {
  Scalar first;
  Scalar second;
};

template <typename Scalar>
__device__ __forceinline__ Pair<Scalar> shuffle_xor(const Pair<Scalar>& value, int offset) {
  return {cuda::shuffle_xor(value.first, offset), cuda::shuffle_xor(value.second, offset)};
}

template <typename Scalar>
__device__ __forceinline__ Pair<Scalar> block_sum(const Pair<Scalar>& value, Pair<Scalar>* shared) {
  const auto add = [](const Pair<Scalar>& a, const Pair<Scalar>& b) {
    return Pair<Scalar>{a.first + b.first, a.second + b.second};
  };
  return block_reduce(value, Pair<Scalar>{0, 0}, add, shared);
}

}  // namespace weft::kernels::cuda
