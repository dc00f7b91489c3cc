#include "dropout_entry.h"
#include "launch_device.h"

#include <weft/kernels/dropout.h>

namespace weft::kernels::cuda {

at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place) {
  return detail::run_dropout<CudaDevice>(x, p, seed, place);
}

}  // namespace weft::kernels::cuda
