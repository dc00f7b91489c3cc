#include "dropout_entry.h"
#include "dropout_launch.h"

#include <weft/kernels/dropout.h>

namespace weft::kernels::cuda {
namespace {

struct CudaDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

  static void run(const detail::DropoutJob& job, c10::Device device) {
    launch_dropout(job, device);
  }
};

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place) {
  return detail::run_dropout<CudaDevice>(x, p, seed, place);
}

}  // namespace weft::kernels::cuda
