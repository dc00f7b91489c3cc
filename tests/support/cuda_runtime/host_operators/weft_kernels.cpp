// Runs weft's CUDA kernels on the emulator, as work of torch's streams.

#include "../runtime.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_emulator.h>

#include <functional>
#include <mutex>
#include <utility>

namespace weft::cuda_runtime {
namespace {

class RuntimeStreams final : public cuda_emulator::Streams {
 public:
  int set_device(int device) override {
    return c10::cuda::ExchangeDevice(static_cast<c10::DeviceIndex>(device));
  }

  void* current(int device) override {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
  }

  bool is_captured(void* stream) override {
    return cuda_runtime::is_captured(static_cast<cudaStream_t>(stream));
  }

  void submit(void* stream, std::function<void()> launch) override {
    count("launches");
    cuda_runtime::submit(static_cast<cudaStream_t>(stream), [this, launch = std::move(launch)] {
      const std::lock_guard lock(mutex_);  // the emulator runs one launch at a time
      launch();
    });
  }

 private:
  std::mutex mutex_;
};

const bool kIsSet = [] {
  cuda_emulator::settings().streams = new RuntimeStreams;
  return true;
}();

}  // namespace
}  // namespace weft::cuda_runtime
