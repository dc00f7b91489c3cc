#include "norm_suite.h"

#include <c10/cuda/CUDAFunctions.h>

namespace weft::kernels::testing {

norm::KernelsUnderTest norm::kernels_under_test() {
  return {.device = c10::DeviceType::CUDA,
          .available = c10::cuda::device_count() > 0,
          .unavailable_reason = "No CUDA device is visible.",
          .forward = cuda::norm_forward,
          .backward = cuda::norm_backward};
}

}  // namespace weft::kernels::testing
