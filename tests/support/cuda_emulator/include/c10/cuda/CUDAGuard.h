#pragma once

#include <c10/core/Device.h>
#include <cuda_emulator.h>

namespace c10::cuda {

class CUDAGuard {
 public:
  explicit CUDAGuard(c10::Device device) {
    if (streams_ != nullptr) before_ = streams_->set_device(device.index());
  }
  ~CUDAGuard() {
    if (streams_ != nullptr) streams_->set_device(before_);
  }
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;

 private:
  weft::cuda_emulator::Streams* const streams_ = weft::cuda_emulator::settings().streams;
  int before_ = 0;
};

}  // namespace c10::cuda
