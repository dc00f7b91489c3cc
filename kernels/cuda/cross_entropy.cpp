#include "cross_entropy_entry.h"
#include "cross_entropy_launch.h"

#include <weft/kernels/cross_entropy.h>

namespace weft::kernels::cuda {
namespace {

struct CudaDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

  static void run(const detail::CrossEntropyStatisticsJob& job, c10::Device device) {
    launch_cross_entropy_statistics(job, device);
  }

  static void run(const detail::CrossEntropyGradientJob& job, c10::Device device) {
    launch_cross_entropy_gradient(job, device);
  }
};

using Entry = detail::CrossEntropyEntry<CudaDevice>;

}  // namespace

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments) {
  return Entry::statistics(arguments);
}

void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits) {
  Entry::gradient(arguments, grad_logits);
}

}  // namespace weft::kernels::cuda
