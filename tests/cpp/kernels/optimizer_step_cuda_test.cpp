#include "optimizer_step_suite.h"

#include <c10/cuda/CUDAFunctions.h>
namespace weft::kernels::testing {

optimizer::KernelsUnderTest optimizer::kernels_under_test() {
  return {.device = c10::DeviceType::CUDA,
          .available = c10::cuda::device_count() > 0,
          .unavailable_reason = "No CUDA device is visible.",
          .adam_step = cuda::adam_step,
          .momentum_step = cuda::momentum_step,
          .split_float = cuda::split_float,
          .join_float = cuda::join_float,
          .quantize_blocks = cuda::quantize_blocks,
          .dequantize_blocks = cuda::dequantize_blocks};
}

}  // namespace weft::kernels::testing
