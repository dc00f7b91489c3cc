#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

// The emulator has one device.
struct CUDAGuard {
  explicit CUDAGuard(c10::Device /*device*/) {}
};

}  // namespace c10::cuda
