// Versions for the host of operators that the CPU does not have, or has with other results. They
// are composed of operators on CUDA tensors.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace weft::cuda_runtime {
namespace {

// The version for the CPU draws from the default generator. Here the mask is that of bernoulli_().
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x,
                                                  double p,
                                                  std::optional<bool> is_training) {
  if (!is_training.value_or(true))
    return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  const at::Tensor mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(at::mul(x, mask), p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// The CPU has no version. x_hat = x * rstd; the mean is over the normalised dims.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y,
                                                     const at::Tensor& x,
                                                     at::IntArrayRef normalized_shape,
                                                     const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> wants) {
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto num_dims = static_cast<int64_t>(normalized_shape.size());
  std::vector<int64_t> normalized, others;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    (dim < x.dim() - num_dims ? others : normalized).push_back(dim);
  }
  const bool has_weight = weight && weight->defined();
  const at::Tensor grad = grad_y.to(type);
  const at::Tensor x_hat = at::mul(x.to(type), rstd.to(type));
  at::Tensor grad_x, grad_weight;
  if (wants[0]) {
    const at::Tensor grad_x_hat = has_weight ? at::mul(grad, weight->to(type)) : grad;
    const at::Tensor mean = at::mean(at::mul(grad_x_hat, x_hat), normalized, /*keepdim=*/true);
    grad_x = at::mul(at::sub(grad_x_hat, at::mul(x_hat, mean)), rstd.to(type)).to(x.scalar_type());
  }
  if (wants[1] && has_weight) {
    const at::Tensor products = at::mul(grad, x_hat);
    grad_weight = (others.empty() ? products : at::sum(products, others)).to(weight->scalar_type());
  }
  return {grad_x, grad_weight};
}

// Products with a result of another dtype exist on CUDA only, which accumulates in float32.
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  return at::mm(a.to(type), b.to(type));
}

at::Tensor& mm_dtype_out(const at::Tensor& a,
                         const at::Tensor& b,
                         at::ScalarType type,
                         at::Tensor& out) {
  return out.copy_(mm_dtype(a, b, type));
}

at::Tensor addmm_dtype(const at::Tensor& self,
                       const at::Tensor& a,
                       const at::Tensor& b,
                       at::ScalarType type,
                       const at::Scalar& beta,
                       const at::Scalar& alpha) {
  return at::addmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}

at::Tensor& addmm_dtype_out(const at::Tensor& self,
                            const at::Tensor& a,
                            const at::Tensor& b,
                            at::ScalarType type,
                            const at::Scalar& beta,
                            const at::Scalar& alpha,
                            at::Tensor& out) {
  return out.copy_(addmm_dtype(self, a, b, type, beta, alpha));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("mm.dtype", TORCH_FN(mm_dtype));
  m.impl("mm.dtype_out", TORCH_FN(mm_dtype_out));
  m.impl("addmm.dtype", TORCH_FN(addmm_dtype));
  m.impl("addmm.dtype_out", TORCH_FN(addmm_dtype_out));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
}

}  // namespace weft::cuda_runtime
