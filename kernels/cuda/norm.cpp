#include "launch_device.h"
#include "norm_entry.h"

#include <weft/kernels/norm.h>

namespace weft::kernels::cuda {
namespace {

using CudaNorm = detail::NormEntry<CudaDevice>;

}  // namespace

NormResult norm_forward(const NormArguments& arguments, Norm norm) {
  return CudaNorm::forward(arguments, norm);
}

NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted) {
  return CudaNorm::backward(grad_y, grad_sum, saved, wanted);
}

}  // namespace weft::kernels::cuda
