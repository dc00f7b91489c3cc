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
// A function of the runtime that a file defines.
#define WEFT_CUDA_API extern "C" WEFT_EXPORTED

namespace weft::cuda_runtime {

// The environment of the process, read once. A delay can be changed later.
struct Settings {
  int num_devices;        // WEFT_CUDA_RUNTIME_DEVICES
  std::size_t num_bytes;  // of a device's memory: WEFT_CUDA_RUNTIME_BYTES
  // Milliseconds that work of a stream waits for the host, or another stream, to need it:
  // WEFT_CUDA_RUNTIME_DELAY_MS. Without a delay the streams run in parallel.
  std::atomic<int> delay_ms;
  // Whether launches of kernels that have no version for the host are skipped, not an error:
  // WEFT_CUDA_RUNTIME_SKIP_KERNELS. Then values are undefined, and memory and its use are not.
  bool skips_kernels;
};
Settings& settings();

// ---- streams (streams.cpp) ---------------------------------------------------------------------

// Appends work to a stream; it runs on the stream's own thread after all work before it. If the
// stream is captured, the work becomes part of the graph. An exception that the work throws is the
// result of all later calls, as an error of a kernel is.
WEFT_EXPORTED void submit(cudaStream_t stream, std::function<void()> work);

WEFT_EXPORTED bool is_captured(cudaStream_t stream);

// Neither counts as a synchronisation.
WEFT_EXPORTED void wait_for_stream(cudaStream_t stream);
void wait_for_device(int device);

// ---- devices and errors (device.cpp) -----------------------------------------------------------

int current_device();

// Sets the error that cudaGetLastError() returns, and returns it.
cudaError_t fail(cudaError_t error, const std::string& reason);

// Sets the error of all later calls.
void fail_for_ever(const std::string& reason);

// cudaSuccess, or the error of all calls: of work that failed, or of a process that was forked
// after its parent had used CUDA.
cudaError_t status();

// ---- counts (device.cpp) -----------------------------------------------------------------------

// Adds one to a count, which weftCudaRuntimeCount(name) returns.
WEFT_EXPORTED void count(const std::string& name);

}  // namespace weft::cuda_runtime

// How often something happened: "synchronizations" (the host waited for a stream, an event or the
// device), "allocations", "launches", "launch NAME" for one kernel, or "operator aten::NAME" for a
// version for the host.
WEFT_CUDA_API int64_t weftCudaRuntimeCount(const char* name);

// Sets the delay of work that no stream has begun, and returns the one before.
WEFT_CUDA_API int weftCudaRuntimeSetDelay(int milliseconds);
