// Devices, errors, counts and the entry points of the driver.

#include "runtime.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <pthread.h>
#include <string>
#include <unistd.h>

namespace weft::cuda_runtime {
namespace {

constexpr int kRelease = 13000;          // CUDA 13.0
constexpr int kErrorNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

long long number_of(const char* name, long long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

struct Errors {
  std::mutex mutex;
  std::string reason;  // why all calls fail, or empty
};

Errors& errors() {
  static Errors& instance = *new Errors;
  return instance;
}

std::atomic<bool> was_used{false};   // by this process or, before the fork, by its parent
std::atomic<bool> is_forked{false};  // after CUDA was used, which CUDA does not allow

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_reason;

struct Counts {
  std::mutex mutex;
  std::map<std::string, int64_t> values;
};

Counts& counts() {
  static Counts& instance = *new Counts;
  return instance;
}

int unsupported_driver_call() { return kErrorNotSupported; }

// torch asks whether a device has a context: each has one as soon as CUDA is used.
int context_state(int /*device*/, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = was_used ? 1 : 0;
  return 0;
}

}  // namespace

Settings& settings() {
  static Settings instance{
      .num_devices = static_cast<int>(number_of("WEFT_CUDA_RUNTIME_DEVICES", 1)),
      .num_bytes = static_cast<std::size_t>(number_of("WEFT_CUDA_RUNTIME_BYTES", 80LL << 30)),
      .delay_ms{static_cast<int>(number_of("WEFT_CUDA_RUNTIME_DELAY_MS", 5))},
      .skips_kernels = number_of("WEFT_CUDA_RUNTIME_SKIP_KERNELS", 0) != 0};
  return instance;
}

int current_device() { return device; }

cudaError_t fail(cudaError_t error, const std::string& reason) {
  last_error = error;
  last_reason = reason;
  return error;
}

void fail_all_later_calls(const std::string& reason) {
  const std::lock_guard lock(errors().mutex);
  if (!errors().reason.empty()) return;
  errors().reason = reason;
  std::fprintf(
      stderr, "CUDA runtime without a device: work of a stream failed: %s\n", reason.c_str());
}

cudaError_t status() {
  static const bool watches_forks = [] {
    pthread_atfork(nullptr, nullptr, [] {
      if (was_used) is_forked = true;
    });
    return true;
  }();
  static_cast<void>(watches_forks);
  if (is_forked) {
    return fail(cudaErrorInitializationError, "CUDA was used before this process was forked");
  }
  was_used = true;
  const std::lock_guard lock(errors().mutex);
  if (errors().reason.empty()) return cudaSuccess;
  return fail(cudaErrorLaunchFailure, errors().reason);
}

void count(const std::string& name) {
  const std::lock_guard lock(counts().mutex);
  ++counts().values[name];
}

}  // namespace weft::cuda_runtime

using namespace weft::cuda_runtime;  // NOLINT: the functions below are C's

int64_t weftCudaRuntimeCount(const char* name) {
  const std::lock_guard lock(counts().mutex);
  const auto found = counts().values.find(name);
  return found == counts().values.end() ? 0 : found->second;
}

int weftCudaRuntimeSetDelay(int milliseconds) { return settings().delay_ms.exchange(milliseconds); }

// ---- devices -----------------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t cudaGetDeviceCount(int* result) {
  *result = settings().num_devices;
  return status();
}

WEFT_CUDA_API cudaError_t cudaGetDevice(int* result) {
  *result = device;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaSetDevice(int value) {
  if (value < 0 || value >= settings().num_devices) {
    return fail(
        cudaErrorInvalidDevice,
        "device " + std::to_string(value) + " of " + std::to_string(settings().num_devices));
  }
  device = value;
  return status();
}

WEFT_CUDA_API cudaError_t cudaDriverGetVersion(int* result) {
  *result = kRelease;
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaRuntimeGetVersion(int* result) {
  *result = kRelease;
  return cudaSuccess;
}

// The figures of an H100, from the table of compute capabilities in the CUDA programming guide.
WEFT_CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* result, int /*device*/) {
  std::memset(result, 0, sizeof *result);
  std::strcpy(result->name, "CUDA runtime without a device");
  result->totalGlobalMem = settings().num_bytes;
  result->major = 9;
  result->multiProcessorCount = 132;
  result->warpSize = 32;
  result->maxThreadsPerBlock = 1024;
  result->maxThreadsPerMultiProcessor = 2048;
  result->maxBlocksPerMultiProcessor = 32;
  result->sharedMemPerBlock = 48 * 1024;
  result->sharedMemPerBlockOptin = 227 * 1024;
  result->sharedMemPerMultiprocessor = 228 * 1024;
  result->regsPerBlock = 65536;
  result->regsPerMultiprocessor = 65536;
  result->maxGridSize[0] = 2147483647;
  result->maxGridSize[1] = result->maxGridSize[2] = 65535;
  result->maxThreadsDim[0] = result->maxThreadsDim[1] = 1024;
  result->maxThreadsDim[2] = 64;
  result->l2CacheSize = 50 << 20;
  return status();
}

WEFT_CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int id) {
  cudaDeviceProp properties;
  if (const auto error = cudaGetDeviceProperties(&properties, id); error != cudaSuccess)
    return error;
  switch (name) {
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    default:
      *value = 0;  // a feature that this device lacks
  }
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int num_chars, int id) {
  std::snprintf(text, static_cast<std::size_t>(num_chars), "0000:%02x:00.0", id);
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* result, int, int) {
  *result = 1;
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

WEFT_CUDA_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
WEFT_CUDA_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- errors ------------------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error == cudaSuccess ? status() : error;
}
WEFT_CUDA_API cudaError_t cudaPeekAtLastError() {
  return last_error == cudaSuccess ? status() : last_error;
}

WEFT_CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  text =
      "error " + std::to_string(static_cast<int>(error)) + " of the CUDA runtime without a device";
  if (!last_reason.empty()) text += ": " + last_reason;
  return text.c_str();
}
WEFT_CUDA_API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// ---- the driver --------------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t
cudaGetDriverEntryPointByVersion(const char* name,
                                 void** function,
                                 unsigned,
                                 unsigned long long,
                                 cudaDriverEntryPointQueryResult* result) {
  *function = std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0
                  ? reinterpret_cast<void*>(&context_state)
                  : reinterpret_cast<void*>(&unsupported_driver_call);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
