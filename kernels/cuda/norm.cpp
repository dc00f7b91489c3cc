#include "norm_entry.h"
#include "norm_launch.h"

#include <weft/kernels/norm.h>

#include <ATen/ops/empty.h>

namespace weft::kernels::cuda {
namespace {

struct CudaDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

  // The kernels read half parameters as they are.
  static at::Tensor params(const at::Tensor& params, at::ScalarType /*scalar*/) { return params; }

  static void run(const detail::NormForwardJob& job, const at::Tensor& like) {
    launch_norm_forward(job, like.device());
  }

  static at::Tensor run(const detail::NormBackwardJob& job,
                        int num_params,
                        const at::Tensor& like) {
    if (num_params == 0) {
      launch_norm_backward(job, 0, nullptr, nullptr, like.device());
      return {};
    }
    const auto options = like.options().dtype(detail::scalar_type_of(like.scalar_type()));
    const at::Tensor partial_sums =
        at::empty({norm_backward_blocks(job, like.device()), num_params, job.row_size}, options);
    at::Tensor sums = at::empty({num_params, job.row_size}, options);
    launch_norm_backward(
        job, num_params, partial_sums.mutable_data_ptr(), sums.mutable_data_ptr(), like.device());
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
