#include "norm_entry.h"
#include "norm_launch.h"

#include <weft/kernels/norm.h>

#include <ATen/ops/empty.h>

namespace weft::kernels::cuda {
namespace {

struct CudaDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

  // The kernels convert bfloat16 and float16 parameters themselves.
  static at::Tensor params(const at::Tensor& params, at::ScalarType /*compute_type*/) {
    return params;
  }

  static void run(const detail::NormForwardJob& job, c10::Device device) {
    launch_norm_forward(job, device);
  }

  static at::Tensor run(const detail::NormBackwardJob& job,
                        int num_params,
                        const at::TensorOptions& options) {
    const c10::Device device = options.device();
    if (num_params == 0) {
      launch_norm_backward(job, 0, nullptr, nullptr, device);
      return {};
    }
    const at::Tensor partial_sums =
        at::empty({norm_backward_blocks(job, device), num_params, job.row_size}, options);
    at::Tensor sums = at::empty({num_params, job.row_size}, options);
    launch_norm_backward(
        job, num_params, partial_sums.mutable_data_ptr(), sums.mutable_data_ptr(), device);
    return sums;
  }
};

using Entry = detail::NormEntry<CudaDevice>;

}  // namespace

NormResult norm_forward(const NormArguments& arguments, Norm norm) {
  return Entry::forward(arguments, norm);
}

NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted) {
  return Entry::backward(grad_y, grad_sum, saved, wanted);
}

}  // namespace weft::kernels::cuda
