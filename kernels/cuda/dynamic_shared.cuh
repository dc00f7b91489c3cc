#pragma once

namespace weft::kernels::cuda {

#ifdef __CUDACC__
// Returns the dynamic shared memory of the block, aligned to 16 bytes. For other compilers than
// nvcc, the emulator in tests/support/cuda_emulator defines this function.
__device__ __forceinline__ void* dynamic_shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}
#endif

}  // namespace weft::kernels::cuda
