#pragma once

#include "entry.h"
#include "norm_job.h"

#include <weft/kernels/norm.h>

#include <utility>

// Checks tensors and builds the jobs of the norms, for all devices. `Device` supplies:
//
//   struct Device {
//     static constexpr c10::DeviceType kType;
//     // Called for a weight or bias of another dtype than `compute_type`. Returns it unchanged, or
//     // converted to `compute_type`.
//     static at::Tensor params(const at::Tensor& params, at::ScalarType compute_type);
//     static void run(const NormForwardJob& job, c10::Device device);  // has elements
//     // Returns the parameters' gradients, summed over rows: [num_params, d] with the dtype
//     // (the compute type) and the device of `options`; undefined if num_params is 0.
//     static at::Tensor run(const NormBackwardJob& job, int num_params,
//                           const at::TensorOptions& options);
//   };
namespace weft::kernels::detail {

// Throw c10::Error for shapes, dtypes or devices other than <weft/kernels/norm.h> requires;
// `device` is the type of device that the norm's input must be on.
void check_norm(const NormArguments& arguments, c10::DeviceType device);
void check_norm_backward(const at::Tensor& grad_y,
                         const std::optional<at::Tensor>& grad_sum,
                         const NormSaved& saved,
                         c10::DeviceType device);

// Returns an uninitialized statistic of the rows of x: x's shape without the last dim, in the
// compute type.
at::Tensor empty_row_stats(const at::Tensor& x);
// Returns an uninitialized contiguous tensor of the shape and dtype of x.
at::Tensor empty_like_input(const at::Tensor& x);

template <typename Device>
struct NormEntry {
  static NormResult forward(const NormArguments& arguments, Norm norm) {
    check_norm(arguments, Device::kType);
    const at::Tensor& x = arguments.x;
    const bool centered = norm == Norm::kLayer;
    NormResult result{.y = empty_like_input(x),
                      .sum = arguments.residual ? empty_like_input(x) : at::Tensor(),
                      .mean = centered ? empty_row_stats(x) : at::Tensor(),
                      .rstd = empty_row_stats(x)};
    if (x.numel() == 0) return zero_row_stats(std::move(result));

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
                x.device());
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
    NormGradients gradients{.input = wanted.input ? empty_like_input(v) : at::Tensor(),
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
                    v.options().dtype(compute_type_of(v.scalar_type())));
    if (num_params > 0) gradients.params = sums.to(params_type);
    return gradients;
  }

 private:
  // Keeps a weight or bias alive while a job reads it.
  class Params {
   public:
    Params(const std::optional<at::Tensor>& params, at::ScalarType storage) {
      if (!params.has_value()) return;
      const auto compute_type = compute_type_of(storage);
      params_ =
          params->scalar_type() == compute_type ? *params : Device::params(*params, compute_type);
      in_compute_type_ = params_.scalar_type() == compute_type;
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

  // Rows without features have no mean and no rstd. The values are never read, but results must be
  // deterministic.
  static NormResult zero_row_stats(NormResult result) {
    result.rstd.zero_();
    if (result.mean.defined()) result.mean.zero_();
    return result;
  }
};

}  // namespace weft::kernels::detail
