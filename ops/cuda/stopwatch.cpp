// Measures time on a CUDA device, between two events on its current stream.

#include "stopwatch.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace weft::ops {

namespace {

class CudaStopwatch final : public Stopwatch {
 public:
  explicit CudaStopwatch(const c10::Device& device) : device_(device) { record(start_); }

  void stop() override { record(stop_); }

  double seconds() const override {
    stop_.synchronize();
    return start_.elapsed_time(stop_) / 1e3;
  }

 private:
  void record(at::cuda::CUDAEvent& event) const {
    event.record(c10::cuda::getCurrentCUDAStream(device_.index()));
  }

  const c10::Device device_;
  at::cuda::CUDAEvent start_{cudaEventDefault};  // records times, unlike torch's default
  at::cuda::CUDAEvent stop_{cudaEventDefault};
};

bool is_not_captured(const c10::Device& device) {
  const c10::cuda::CUDAGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
}

std::unique_ptr<Stopwatch> start(const c10::Device& device) {
  return std::make_unique<CudaStopwatch>(device);
}

const bool kIsSet = (set_cuda_stopwatch({&is_not_captured, &start}), true);

}  // namespace

}  // namespace weft::ops
