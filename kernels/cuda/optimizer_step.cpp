#include "float_codes_entry.h"
#include "launch_device.h"
#include "optimizer_step_entry.h"

namespace weft::kernels::cuda {
namespace {

using Steps = detail::OptimizerStepEntry<CudaDevice>;
using Codes = detail::FloatCodesEntry<CudaDevice>;

}  // namespace

void adam_step(const AdamStep& step) { Steps::adam_step(step); }

void momentum_step(const MomentumStep& step) { Steps::momentum_step(step); }

std::tuple<at::Tensor, at::Tensor> split_float(const at::Tensor& x, at::ScalarType low_dtype) {
  return Codes::split_float(x, low_dtype);
}

at::Tensor join_float(const at::Tensor& high, const at::Tensor& low) {
  return Codes::join_float(high, low);
}

std::tuple<at::Tensor, at::Tensor> quantize_blocks(const at::Tensor& x, bool signed_codes) {
  return Codes::quantize_blocks(x, signed_codes);
}

at::Tensor dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale) {
  return Codes::dequantize_blocks(codes, scale);
}

}  // namespace weft::kernels::cuda
