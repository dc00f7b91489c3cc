#include "activation_entry.h"
#include "instruction_sets.h"

#include <weft/kernels/activation.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

namespace weft::kernels::cpu {
namespace {

// Below this size a second thread costs more than it saves; also torch's elementwise grain size.
constexpr int64_t kElementsPerThread = 32768;

struct CpuDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  // Not at::empty: a trip through the dispatcher costs as much as a small kernel.
  static at::Tensor empty_like(const at::Tensor& like) {
    return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type()));
  }

  static void run(const detail::ActivationJob& job, c10::Device /*device*/) {
    static const auto loops = supported_instruction_sets().front().loops.activation;
    at::parallel_for(0, job.num_elements, kElementsPerThread, [&job](int64_t first, int64_t last) {
      loops(job, first, last);
    });
  }
};

using Entry = detail::ActivationEntry<CpuDevice>;

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, Activation activation) {
  return Entry::forward(x, activation);
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation) {
  return Entry::backward(grad_h, x, activation);
}

at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  return Entry::gated_forward(gate, up, activation);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation) {
  return Entry::gated_backward(grad_h, gate, up, activation);
}

}  // namespace weft::kernels::cpu
