#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime.h>

namespace c10::cuda {

inline cudaStream_t getCurrentCUDAStream(c10::DeviceIndex device = 0) {
  auto* const streams = weft::cuda_emulator::settings().streams;
  return streams == nullptr ? nullptr : streams->current(device);
}

}  // namespace c10::cuda
