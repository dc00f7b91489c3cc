// Kernels: the code that nvcc adds to a program registers them here, but no device runs them. A
// launch within the limits is counted. Unless launches are skipped, it is also an error: its
// operator should have had a version for the host.

#include "runtime.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace weft::cuda_runtime {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, std::string> names;
};

Kernels& kernels() {
  static Kernels& instance = *new Kernels;
  return instance;
}

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};
thread_local Configuration pushed;

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes) {
  if (const auto error = status(); error != cudaSuccess) return error;
  std::string name = "unknown";
  {
    const std::lock_guard lock(kernels().mutex);
    const auto found = kernels().names.find(kernel);
    if (found != kernels().names.end()) name = found->second;
  }
  const auto num_threads = std::size_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 2147483647 || grid.y > 65535 ||
      grid.z > 65535 || num_threads == 0 || num_threads > 1024 || block.z > 64 ||
      shared_bytes > 227 * 1024) {
    return fail(cudaErrorInvalidConfiguration, "a launch beyond the limits of the device: " + name);
  }
  count("launches");
  count("launch " + name);
  const bool only_takes_time = name.find("spin_kernel") != std::string::npos;  // torch.cuda._sleep
  if (settings().skips_kernels || only_takes_time) return cudaSuccess;
  return fail(cudaErrorNotSupported, "a kernel without a version for the host: " + name);
}

}  // namespace
}  // namespace weft::cuda_runtime

using namespace weft::cuda_runtime;  // NOLINT: the functions below are C's

WEFT_CUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
WEFT_CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
WEFT_CUDA_API void __cudaUnregisterFatBinary(void**) {}
WEFT_CUDA_API void __cudaRegisterVar(
    void**, char*, char*, const char*, int, std::size_t, int, int) {}
WEFT_CUDA_API void __cudaRegisterFunction(
    void**, const char* kernel, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(kernels().mutex);
  kernels().names[kernel] = name;
}

WEFT_CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid,
                                                   dim3 block,
                                                   std::size_t shared_bytes,
                                                   cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
WEFT_CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid,
                                                     dim3* block,
                                                     std::size_t* shared_bytes,
                                                     void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  std::memcpy(stream, &pushed.stream, sizeof pushed.stream);
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* result, const void* kernel) {
  *result = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaLaunchKernel(
    const void* kernel, dim3 grid, dim3 block, void**, std::size_t shared_bytes, cudaStream_t) {
  return launch(kernel, grid, block, shared_bytes);
}
WEFT_CUDA_API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void**, std::size_t shared_bytes, cudaStream_t) {
  return launch(kernel, grid, block, shared_bytes);
}
WEFT_CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                              const void* kernel,
                                              void**) {
  return launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

WEFT_CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* result, const void*) {
  std::memset(result, 0, sizeof *result);
  result->maxThreadsPerBlock = 1024;
  result->numRegs = 32;
  result->binaryVersion = result->ptxVersion = 90;
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* result,
                                                                        const void*,
                                                                        int,
                                                                        std::size_t) {
  *result = 2;
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* result, const void*, int, std::size_t, unsigned) {
  *result = 2;
  return cudaSuccess;
}
