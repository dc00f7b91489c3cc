#pragma once

#include "entry.h"
#include "float_codes_job.h"

#include <weft/kernels/float_codes.h>

// Checks tensors and builds FloatCodesJobs, for all devices. `Device` supplies kType and
// run(const FloatCodesJob& job, c10::Device device), for jobs with elements.
namespace weft::kernels::detail {

// Throws c10::Error if x is not on a device of type `device`.
void check_codes_device(const at::Tensor& x, c10::DeviceType device);
// Returns an uninitialized contiguous tensor of the shape of x.
at::Tensor empty_of_type(const at::Tensor& x, at::ScalarType type);
// Returns uninitialized scales for the blocks of x.
at::Tensor empty_scale(const at::Tensor& x);
// Returns a job with the rows of x, which has elements.
FloatCodesJob job_with_rows(FloatCodesOp op, const at::Tensor& x);

template <typename Device>
struct FloatCodesEntry {
  static std::tuple<at::Tensor, at::Tensor> split_float(const at::Tensor& x,
                                                        at::ScalarType low_dtype) {
    check_split_float(x, low_dtype);
    check_codes_device(x, Device::kType);
    at::Tensor high = empty_of_type(x, at::kBFloat16);
    at::Tensor low = empty_of_type(x, low_dtype);
    if (x.numel() > 0) {
      const ContiguousOperand contiguous_x(&x);
      run_split(FloatCodesOp::kSplit, contiguous_x.data(), high, low);
    }
    return {std::move(high), std::move(low)};
  }

  static at::Tensor join_float(const at::Tensor& high, const at::Tensor& low) {
    check_join_float(high, low);
    check_codes_device(high, Device::kType);
    at::Tensor x = empty_of_type(high, at::kFloat);
    if (x.numel() > 0) {
      run_split(FloatCodesOp::kJoin, x.mutable_data_ptr(), high.contiguous(), low.contiguous());
    }
    return x;
  }

  static std::tuple<at::Tensor, at::Tensor> quantize_blocks(const at::Tensor& x,
                                                            bool signed_codes) {
    check_quantize_blocks(x);
    check_codes_device(x, Device::kType);
    at::Tensor codes = empty_of_type(x, signed_codes ? at::kChar : at::kByte);
    at::Tensor scale = empty_scale(x);
    if (x.numel() > 0) {
      const ContiguousOperand contiguous_x(&x);
      run_quantize(FloatCodesOp::kQuantize, contiguous_x.data(), codes, scale);
    }
    return {std::move(codes), std::move(scale)};
  }

  static at::Tensor dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale) {
    check_dequantize_blocks(codes, scale);
    check_codes_device(codes, Device::kType);
    at::Tensor x = empty_of_type(codes, at::kFloat);
    if (x.numel() > 0) {
      run_quantize(
          FloatCodesOp::kDequantize, x.mutable_data_ptr(), codes.contiguous(), scale.contiguous());
    }
    return x;
  }

 private:
  // The arrays of a job that are only read are not changed.
  static void run_split(FloatCodesOp op,
                        const void* x,
                        const at::Tensor& high,
                        const at::Tensor& low) {
    FloatCodesJob job = job_with_rows(op, high.view({-1}));
    job.is_narrow = low.scalar_type() == at::kChar;
    job.x = const_cast<void*>(x);
    job.codes = high.mutable_data_ptr();
    job.low = low.mutable_data_ptr();
    Device::run(job, high.device());
  }

  static void run_quantize(FloatCodesOp op,
                           const void* x,
                           const at::Tensor& codes,
                           const at::Tensor& scale) {
    FloatCodesJob job = job_with_rows(op, codes);
    job.is_signed = codes.scalar_type() == at::kChar;
    job.x = const_cast<void*>(x);
    job.codes = codes.mutable_data_ptr();
    job.scales = scale.mutable_data_ptr<float>();
    Device::run(job, codes.device());
  }
};

}  // namespace weft::kernels::detail
