#pragma once

#include "entry.h"
#include "norm_job.h"

#include <weft/kernels/norm.h>

#include <utility>

// Checks tensors and builds the jobs of the norms, for all devices. `Device` supplies:
//
//   struct Device {
//     static constexpr c10::DeviceType kType;
//     // Returns a weight or bias of another type than `scalar`: as it is, or converted.
//     static at::Tensor params(const at::Tensor& params, at::ScalarType scalar);
//     static void run(const NormForwardJob& job, const at::Tensor& like);  // has elements
//     // Returns the parameters' gradients, summed over rows: [num_params, d] scalars; undefined
//     // if num_params is 0.
//     static at::Tensor run(const NormBackwardJob& job, int num_params, const at::Tensor& like);
//   };
namespace weft::kernels::detail {

// Throw c10::Error for operands that do not match or are not on `device`.
void check_norm(const NormArguments& arguments, c10::DeviceType device);
void check_norm_backward(const at::Tensor& grad_y,
                         const std::optional<at::Tensor>& grad_sum,
                         const NormSaved& saved,
                         c10::DeviceType device);

// Return a contiguous tensor: one scalar per row of x; the shape and dtype of x.
at::Tensor empty_norm_rows(const at::Tensor& x);
at::Tensor empty_norm_values(const at::Tensor& x);

template <typename Device>
struct NormEntry {
  static NormResult forward(const NormArguments& arguments, Norm norm) {
    check_norm(arguments, Device::kType);
    const at::Tensor& x = arguments.x;
    const bool centered = norm == Norm::kLayer;
    NormResult result{.y = empty_norm_values(x),
                      .sum = arguments.residual ? empty_norm_values(x) : at::Tensor(),
                      .mean = centered ? empty_norm_rows(x) : at::Tensor(),
                      .rstd = empty_norm_rows(x)};
    if (x.numel() == 0) return zero_rows(std::move(result));

    const Params weight(arguments.weight, x.scalar_type());
    const Params bias(arguments.bias, x.scalar_type());
    const ContiguousOperand contiguous_x(&x);
    const ContiguousOperand residual(optional_ptr(arguments.residual));
    Device::run(NormForwardJob{.type = storage_type(x.scalar_type()),
                               .centered = centered,
                               .params_in_compute_type = weight.in_compute_type(),
                               .eps = arguments.eps,
                               .num_rows = x.numel() / x.size(-1),
                               .row_size = x.size(-1),
                               .x = contiguous_x.data(),
                               .residual = residual.data(),
                               .weight = weight.data(),
                               .bias = bias.data(),
                               .sum = writable(result.sum),
                               .y = writable(result.y),
                               .mean = writable(result.mean),
                               .rstd = writable(result.rstd)},
                x);
    return result;
  }

  static NormGradients backward(const at::Tensor& grad_y,
                                const std::optional<at::Tensor>& grad_sum,
                                const NormSaved& saved,
                                NormWanted wanted) {
    check_norm_backward(grad_y, grad_sum, saved, Device::kType);
    const at::Tensor& v = saved.norm_input;  // the name in norm_job.h
    const int num_params = !wanted.params ? 0 : wanted.bias ? 2 : 1;
    const auto params_type = saved.weight ? saved.weight->scalar_type() : v.scalar_type();
    NormGradients gradients{.input = wanted.input ? empty_norm_values(v) : at::Tensor(),
                            .params = {}};
    if (v.numel() == 0) {
      if (num_params > 0) {
        gradients.params = v.new_zeros({num_params, v.size(-1)}, v.options().dtype(params_type));
      }
      return gradients;
    }
    const Params weight(saved.weight, v.scalar_type());
    const ContiguousOperand contiguous_grad_y(&grad_y);
    const ContiguousOperand contiguous_grad_sum(optional_ptr(grad_sum));
    const ContiguousOperand contiguous_v(&v);
    const ContiguousOperand mean(optional_ptr(saved.mean));
    const ContiguousOperand rstd(&saved.rstd);
    const auto sums =
        Device::run(NormBackwardJob{.type = storage_type(v.scalar_type()),
                                    .centered = saved.mean.has_value(),
                                    .params_in_compute_type = weight.in_compute_type(),
                                    .has_bias = num_params == 2,
                                    .num_rows = v.numel() / v.size(-1),
                                    .row_size = v.size(-1),
                                    .grad_y = contiguous_grad_y.data(),
                                    .grad_sum = contiguous_grad_sum.data(),
                                    .v = contiguous_v.data(),
                                    .weight = weight.data(),
                                    .mean = mean.data(),
                                    .rstd = rstd.data(),
                                    .grad_v = writable(gradients.input)},
                    num_params,
                    v);
    if (num_params > 0) gradients.params = sums.to(params_type);
    return gradients;
  }

 private:
  // Keeps a weight or bias alive while a job reads it.
  class Params {
   public:
    Params(const std::optional<at::Tensor>& params, at::ScalarType storage) {
      if (!params.has_value()) return;
      const auto scalar = scalar_type_of(storage);
      params_ = params->scalar_type() == scalar ? *params : Device::params(*params, scalar);
      in_compute_type_ = params_.scalar_type() == scalar;
      params_ = params_.contiguous();
    }

    bool in_compute_type() const { return in_compute_type_; }
    const void* data() const { return params_.defined() ? params_.const_data_ptr() : nullptr; }

   private:
    at::Tensor params_;
    bool in_compute_type_ = true;
  };

  static void* writable(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  }

  // Rows without features have no mean: these values are never read, but must be deterministic.
  static NormResult zero_rows(NormResult result) {
    result.rstd.zero_();
    if (result.mean.defined()) result.mean.zero_();
    return result;
  }
};

}  // namespace weft::kernels::detail
