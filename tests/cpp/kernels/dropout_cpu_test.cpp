#include "dropout_suite.h"

namespace weft::kernels::testing {

dropout::KernelsUnderTest dropout::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .dropout = cpu::dropout};
}

}  // namespace weft::kernels::testing
