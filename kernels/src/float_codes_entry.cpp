#include "float_codes_entry.h"

#include <ATen/ops/empty.h>

namespace weft::kernels {

namespace {

bool is_low_type(at::ScalarType type) { return type == at::kShort || type == at::kChar; }

}  // namespace

void check_split_float(const at::Tensor& x, at::ScalarType low_dtype) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat,
                   "weft::split_float: got x of dtype ",
                   x.scalar_type(),
                   "; pass float32.");
  TORCH_CHECK_TYPE(is_low_type(low_dtype),
                   "weft::split_float: got low_dtype ",
                   low_dtype,
                   "; pass int16 or int8.");
}

void check_join_float(const at::Tensor& high, const at::Tensor& low) {
  TORCH_CHECK_TYPE(high.scalar_type() == at::kBFloat16 && is_low_type(low.scalar_type()),
                   "weft::join_float: got high of dtype ",
                   high.scalar_type(),
                   " and low of dtype ",
                   low.scalar_type(),
                   "; pass bfloat16, and int16 or int8.");
  TORCH_CHECK_VALUE(high.sym_sizes() == low.sym_sizes(),
                    "weft::join_float: got high of shape ",
                    high.sym_sizes(),
                    " and low of shape ",
                    low.sym_sizes(),
                    "; pass tensors of one shape.");
  TORCH_CHECK_VALUE(high.device() == low.device(),
                    "weft::join_float: got high on ",
                    high.device(),
                    " and low on ",
                    low.device(),
                    "; move them to one device.");
}

void check_quantize_blocks(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat,
                   "weft::quantize_blocks: got x of dtype ",
                   x.scalar_type(),
                   "; pass float32.");
}

void check_dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale) {
  TORCH_CHECK_TYPE((codes.scalar_type() == at::kChar || codes.scalar_type() == at::kByte) &&
                       scale.scalar_type() == at::kFloat,
                   "weft::dequantize_blocks: got codes of dtype ",
                   codes.scalar_type(),
                   " and scale of dtype ",
                   scale.scalar_type(),
                   "; pass int8 or uint8, and float32.");
  const auto expected = scale_shape(codes.sym_sizes());
  TORCH_CHECK_VALUE(scale.sym_sizes() == c10::SymIntArrayRef(expected),
                    "weft::dequantize_blocks: got scale of shape ",
                    scale.sym_sizes(),
                    " with codes of shape ",
                    codes.sym_sizes(),
                    "; pass ",
                    c10::SymIntArrayRef(expected),
                    ", one scale per 256 elements of a row.");
  TORCH_CHECK_VALUE(codes.device() == scale.device(),
                    "weft::dequantize_blocks: got codes on ",
                    codes.device(),
                    " and scale on ",
                    scale.device(),
                    "; move them to one device.");
}

c10::SymDimVector scale_shape(c10::SymIntArrayRef sizes) {
  const auto blocks = [](const c10::SymInt& elements) {
    return (elements + (detail::kCodeBlock - 1)) / detail::kCodeBlock;
  };
  if (sizes.size() < 2) return {blocks(c10::multiply_integers(sizes))};
  return {sizes[0], blocks(c10::multiply_integers(sizes.slice(1)))};
}

namespace detail {

void check_codes_device(const at::Tensor& x, c10::DeviceType device) {
  TORCH_CHECK(x.device().type() == device,
              "float codes got a tensor on ",
              x.device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
}

at::Tensor empty_of_type(const at::Tensor& x, at::ScalarType type) {
  return at::empty(x.sizes(), x.options().dtype(type));
}

at::Tensor empty_scale(const at::Tensor& x) {
  return at::empty(C10_AS_INTARRAYREF_SLOW(scale_shape(x.sym_sizes())),
                   x.options().dtype(at::kFloat));
}

FloatCodesJob job_with_rows(FloatCodesOp op, const at::Tensor& x) {
  const int64_t num_rows = x.dim() < 2 ? 1 : x.size(0);
  return {.op = op,
          .is_narrow = false,
          .is_signed = false,
          .num_rows = num_rows,
          .row_size = x.numel() / num_rows};
}

}  // namespace detail
}  // namespace weft::kernels
