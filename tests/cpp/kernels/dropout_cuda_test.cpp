#include "dropout_suite.h"

#include <c10/cuda/CUDAFunctions.h>

namespace weft::kernels::testing {

dropout::KernelsUnderTest dropout::kernels_under_test() {
  return {.device = c10::DeviceType::CUDA,
          .available = c10::cuda::device_count() > 0,
          .unavailable_reason = "No CUDA device is visible.",
          .dropout = cuda::dropout};
}

}  // namespace weft::kernels::testing
