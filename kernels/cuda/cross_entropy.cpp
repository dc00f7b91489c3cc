#include "cross_entropy_entry.h"
#include "launch_device.h"

#include <weft/kernels/cross_entropy.h>

namespace weft::kernels::cuda {
namespace {

using CudaCrossEntropy = detail::CrossEntropyEntry<CudaDevice>;

}  // namespace

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments) {
  return CudaCrossEntropy::statistics(arguments);
}

void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits) {
  CudaCrossEntropy::gradient(arguments, grad_logits);
}

}  // namespace weft::kernels::cuda
