#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// RMS and layer norms over the last dim, with the addition of a residual before them.
//
// Shapes: x, residual and gradients [..., d], all of one shape; weight and bias [d]; mean and rstd
// [...], whose elements are the rows. Any strides are read; results are contiguous.
// Dtypes: float32, float64, bfloat16, float16 for x; weight and bias have that of x, or are both
// float32 beside half types. Half types are computed in float32 and rounded once; mean and rstd
// are float32, or float64 for float64.
// Errors: c10::Error when shapes, dtypes or devices disagree, before anything is allocated.
//
// Nothing here records autograd history.
namespace weft::kernels {

enum class Norm { kRms, kLayer };

struct NormArguments {
  const at::Tensor& x;
  const std::optional<at::Tensor>& residual;
  const std::optional<at::Tensor>& weight;
  const std::optional<at::Tensor>& bias;  // only with weight
  double eps;
};

struct NormResult {
  at::Tensor y;     // norm(x + residual) * weight + bias
  at::Tensor sum;   // x + residual, rounded, which is what is normed; undefined without residual
  at::Tensor mean;  // undefined for kRms
  at::Tensor rstd;
};

struct NormSaved {
  const at::Tensor& v;  // what was normed
  const std::optional<at::Tensor>& weight;
  const std::optional<at::Tensor>& mean;  // absent for kRms
  const at::Tensor& rstd;
};

struct NormWanted {
  bool input;
  bool params;
  bool bias;  // with `params`
};

struct NormGradients {
  at::Tensor input;   // of x and of residual alike; undefined where not wanted
  at::Tensor params;  // [1, d]: of weight; [2, d]: of weight and bias; in the dtype of weight
};

namespace cpu {

NormResult norm_forward(const NormArguments& arguments, Norm norm);

// `grad_sum` is the gradient of NormResult::sum, and is added to that of the input.
NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted);

}  // namespace cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda. They run on the current
// stream of the input's device.
namespace cuda {

NormResult norm_forward(const NormArguments& arguments, Norm norm);

NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted);

}  // namespace cuda

}  // namespace weft::kernels
