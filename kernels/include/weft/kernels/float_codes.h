#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

// Conversions between float32 tensors and the low-precision formats that optimizer_step.h steps.
//
// A split float is a bfloat16 number, which is the float32 number rounded to nearest, and the
// difference of the bits as an integer: int16 restores all 32 bits, int8 the 24 upper ones, to
// which the number is rounded first. NaN loses its payload.
//
// Codes are 8-bit numbers with one float32 scale, the largest magnitude, per block of 256
// elements of a row; the last block of a row may be shorter, and no block crosses rows. The rows
// are those of [size(0), product of the other sizes]; a tensor with fewer than two dims is one row.
// Scales have the shape [rows, blocks of a row], or [blocks] for fewer than two dims. A number is
// scale * sign * (code / 127)^2 if signed and scale * (code / 255)^2 if unsigned: the codes are
// those of square roots. Block-wise 8-bit states are those of Dettmers et al. (2021),
// arXiv:2110.02861; the square root is the companding function of the second moment of FlashOptim,
// arXiv:2602.23349, here used for both moments. A positive number gets at least the unsigned code
// 1. A block with a number that is not finite gets the scale NaN and codes 0.
//
// Errors: c10::Error, before anything is allocated, for dtypes and shapes other than stated, or
// tensors on different devices. Any strides are read; results are contiguous.
namespace weft::kernels {

// The checks of the functions below; they read no data and work with tensors on meta.
void check_split_float(const at::Tensor& x, at::ScalarType low_dtype);
void check_join_float(const at::Tensor& high, const at::Tensor& low);
void check_quantize_blocks(const at::Tensor& x);
void check_dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale);
// Returns the shape of the scales of a tensor with these sizes.
c10::SymDimVector scale_shape(c10::SymIntArrayRef sizes);

namespace cpu {

// x float32, low_dtype int16 or int8 -> (high bfloat16, low), both of the shape of x.
std::tuple<at::Tensor, at::Tensor> split_float(const at::Tensor& x, at::ScalarType low_dtype);
// high bfloat16, low int16 or int8 of the same shape -> float32.
at::Tensor join_float(const at::Tensor& high, const at::Tensor& low);

// x float32 -> (codes int8 if `signed_codes`, else uint8; scale float32), rounded to nearest.
// Without signs, negative numbers get code 0.
std::tuple<at::Tensor, at::Tensor> quantize_blocks(const at::Tensor& x, bool signed_codes);
// codes int8 or uint8, scale float32 -> float32.
at::Tensor dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale);

}  // namespace cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda.
namespace cuda {

std::tuple<at::Tensor, at::Tensor> split_float(const at::Tensor& x, at::ScalarType low_dtype);
at::Tensor join_float(const at::Tensor& high, const at::Tensor& low);
std::tuple<at::Tensor, at::Tensor> quantize_blocks(const at::Tensor& x, bool signed_codes);
at::Tensor dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale);

}  // namespace cuda

}  // namespace weft::kernels
