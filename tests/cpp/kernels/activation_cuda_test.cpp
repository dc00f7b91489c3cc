#include "activation_suite.h"

#include <c10/cuda/CUDAFunctions.h>

namespace weft::kernels::testing {

KernelsUnderTest kernels_under_test() {
  return {.device = c10::DeviceType::CUDA,
          .available = c10::cuda::device_count() > 0,
          .unavailable_reason = "No CUDA device is visible.",
          .activation_forward = cuda::activation_forward,
          .activation_backward = cuda::activation_backward,
          .gated_forward = cuda::gated_forward,
          .gated_backward = cuda::gated_backward,
          .gate_up_forward = cuda::gate_up_forward,
          .gate_up_backward = cuda::gate_up_backward};
}

}  // namespace weft::kernels::testing
