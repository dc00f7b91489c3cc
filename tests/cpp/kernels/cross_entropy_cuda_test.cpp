#include "cross_entropy_suite.h"

#include <c10/cuda/CUDAFunctions.h>

namespace weft::kernels::testing::cross_entropy {

KernelsUnderTest kernels_under_test() {
  return {.device = c10::DeviceType::CUDA,
          .available = c10::cuda::device_count() > 0,
          .unavailable_reason = "No CUDA device is visible.",
          .statistics = cuda::cross_entropy_statistics,
          .gradient = cuda::cross_entropy_gradient};
}

}  // namespace weft::kernels::testing::cross_entropy
