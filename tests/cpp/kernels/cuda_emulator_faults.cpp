#include "cuda_emulator_faults.h"

#include "block_reduce.cuh"
#include "launch.cuh"
#include "vector_access.cuh"

namespace weft::cuda_emulator::testing {
namespace {

constexpr int kThreads = 256;

using kernels::cuda::LaunchShape;

template <typename... Params, typename... Arguments>
void run(void (*kernel)(Params...), const LaunchShape& shape, Arguments... arguments) {
  kernels::cuda::launch_kernel(kernel, shape, nullptr, arguments...);
}

__global__ void sum_kernel(const float* numbers, float* sum, bool has_fault) {
  __shared__ float partial_sums[32];
  float value = numbers[threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0U, value, offset);
  if (threadIdx.x % 32 == 0) partial_sums[threadIdx.x / 32] = value;
  if (!has_fault) __syncthreads();
  float total = threadIdx.x % 32 < kThreads / 32 ? partial_sums[threadIdx.x % 32] : 0;
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0U, total, offset);
  if (threadIdx.x == 0) *sum = total;
}

__global__ void rotate_kernel(const float* numbers, float* rotated, bool has_fault) {
  __shared__ float values[kThreads];
  for (int turn = 0; turn < 2; ++turn) {
    values[threadIdx.x] = numbers[threadIdx.x] + static_cast<float>(turn);
    __syncthreads();
    rotated[turn * kThreads + static_cast<int>(threadIdx.x)] =
        values[(threadIdx.x + 37) % kThreads];
    if (!has_fault) __syncthreads();
  }
}

__global__ void return_kernel(bool has_fault) {
  if (has_fault && threadIdx.x >= kThreads / 2) return;
  __syncthreads();
}

__global__ void shuffle_kernel(bool has_fault) {
  if (has_fault && threadIdx.x == 3) return;
  __shfl_xor_sync(~0U, 1.0F, 1);
}

__global__ void partial_mask_kernel(bool has_fault) {
  __shfl_xor_sync(has_fault ? 0xFFFFU : ~0U, 1.0F, 1);
}

__global__ void unset_kernel(float* numbers, bool has_fault) {
  __shared__ float values[kThreads];
  if (!has_fault) values[threadIdx.x] = 0;
  numbers[threadIdx.x] += values[threadIdx.x];
}

__global__ void bounds_kernel(float* numbers, int size) {
  const int idx = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (idx < size) numbers[idx] *= 2;
}

__global__ void shared_kernel(float* number, bool has_fault) {
  auto* values = static_cast<float*>(kernels::cuda::dynamic_shared_memory());
  values[threadIdx.x + (has_fault ? 1 : 0)] = 1;
  *number = values[threadIdx.x + (has_fault ? 1 : 0)];
}

__global__ void load_kernel(const float* numbers, float* copies) {
  float values[4];
  kernels::cuda::load_pack<float>(numbers, threadIdx.x * 4, values);
  for (int i = 0; i < 4; ++i) copies[threadIdx.x * 4 + i] = values[i];
}

__global__ void empty_kernel() {}

}  // namespace

void sum_without_barrier(const float* numbers, float* sum, bool has_fault) {
  run(sum_kernel, {1, kThreads}, numbers, sum, has_fault);
}

void overwrite_without_barrier(const float* numbers, float* rotated, bool has_fault) {
  run(rotate_kernel, {1, kThreads}, numbers, rotated, has_fault);
}

void return_before_barrier(bool has_fault) { run(return_kernel, {1, kThreads}, has_fault); }

void shuffle_without_lane(bool has_fault) { run(shuffle_kernel, {1, 32}, has_fault); }

void shuffle_with_partial_mask(bool has_fault) { run(partial_mask_kernel, {1, 32}, has_fault); }

void read_unset_shared(float* numbers, bool has_fault) {
  run(unset_kernel, {1, kThreads}, numbers, has_fault);
}

void step_out_of_bounds(float* numbers, int size, bool has_fault) {
  run(bounds_kernel, {3, kThreads}, numbers, has_fault ? size + 1 : size);
}

void step_out_of_shared(float* number, bool has_fault) {
  run(shared_kernel, {1, 32, 32 * sizeof(float)}, number, has_fault);
}

void load_misaligned(const float* numbers, float* copies, bool has_fault) {
  run(load_kernel, {1, 32}, has_fault ? numbers + 1 : numbers, copies);
}

void launch_too_many_threads(bool has_fault) { run(empty_kernel, {1, has_fault ? 1025U : 1024U}); }

void launch_with_too_much_shared(bool has_fault) {
  run(empty_kernel, {1, 32, (48U * 1024) + (has_fault ? 1U : 0U)});
}

void allow_too_much_shared(bool has_fault) {
  cudaFuncSetAttribute(shared_kernel,
                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                       settings().device.shared_bytes_per_block + (has_fault ? 1 : 0));
}

}  // namespace weft::cuda_emulator::testing
