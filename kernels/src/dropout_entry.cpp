#include "dropout_entry.h"

#include <ATen/ops/empty.h>

namespace weft::kernels::detail {

void check_dropout(const at::Tensor& x, c10::DeviceType device) {
  TORCH_CHECK(x.device().type() == device,
              "dropout got x on ",
              x.device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
  TORCH_CHECK(is_supported(x.scalar_type()),
              "dropout got x of dtype ",
              x.scalar_type(),
              "; convert to float32, float64, bfloat16 or float16.");
}

at::Tensor empty_like_x(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

}  // namespace weft::kernels::detail
