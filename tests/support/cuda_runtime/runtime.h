#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// A CUDA runtime without a device, for tests of the host side: it is preloaded in place of
// libcudart, so that torch's own dispatcher, caching allocator, streams and events run on it.
// Device memory is the host's. README.md explains what it models.
#define WEFT_EXPORTED __attribute__((visibility("default")))
// Declares a function of CUDA or NCCL that this library defines instead.
#define WEFT_CUDA_API extern "C" WEFT_EXPORTED

namespace weft::cuda_runtime {

// The environment of the process, read once. `delay_ms` can be changed later.
struct Settings {
  int num_devices;        // WEFT_CUDA_RUNTIME_DEVICES
  std::size_t num_bytes;  // of a device's memory: WEFT_CUDA_RUNTIME_BYTES
  // Milliseconds that each work item of a stream waits, unless the host or another stream needs it:
  // WEFT_CUDA_RUNTIME_DELAY_MS. Without a delay the streams run in parallel.
  std::atomic<int> delay_ms;
  // Whether launches of kernels that have no version for the host are skipped, not an error:
  // WEFT_CUDA_RUNTIME_SKIP_KERNELS. Then all memory of devices is zero.
  bool skips_kernels;
};
Settings& settings();

// ---- streams (streams.cpp) ---------------------------------------------------------------------

// Appends work to a stream; it runs on the stream's own thread after all work before it. If the
// stream is captured, the work becomes part of the graph. If the work throws an exception, all
// later calls return an error, as after an error in a kernel.
WEFT_EXPORTED void submit(cudaStream_t stream, std::function<void()> work);

WEFT_EXPORTED bool is_captured(cudaStream_t stream);

// These waits are not counted as synchronizations.
WEFT_EXPORTED void wait_for_stream(cudaStream_t stream);
void wait_for_device(int device);

// ---- devices and errors (device.cpp) -----------------------------------------------------------

int current_device();

// Sets the error that cudaGetLastError() returns, and returns it.
cudaError_t fail(cudaError_t error, const std::string& reason);

// Makes all later calls return an error with this reason.
void fail_all_later_calls(const std::string& reason);

// Returns cudaSuccess, or the error that all calls return because work of a stream has failed, or
// because this process was forked after its parent had used CUDA.
cudaError_t status();

// ---- counts (device.cpp) -----------------------------------------------------------------------

// Adds one to a count, which weftCudaRuntimeCount(name) returns.
WEFT_EXPORTED void count(const std::string& name);

}  // namespace weft::cuda_runtime

// How often something happened: "synchronizations" (the host waited for a stream, an event or the
// device), "allocations", "launches", "launch NAME" for one kernel, "nccl NAME" for one call of
// NCCL, or "operator aten::NAME" for a version for the host.
WEFT_CUDA_API int64_t weftCudaRuntimeCount(const char* name);

// Sets the delay of work that no stream has begun, and returns the previous delay.
WEFT_CUDA_API int weftCudaRuntimeSetDelay(int milliseconds);
