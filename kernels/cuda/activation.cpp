#include "activation_entry.h"
#include "launch_device.h"

#include <weft/kernels/activation.h>

namespace weft::kernels::cuda {
namespace {

using CudaActivation = detail::ActivationEntry<CudaDevice>;

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, Activation activation) {
  return CudaActivation::forward(x, activation);
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation) {
  return CudaActivation::backward(grad_h, x, activation);
}

at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  return CudaActivation::gated_forward(gate, up, activation);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation) {
  return CudaActivation::gated_backward(grad_h, gate, up, activation);
}

at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation) {
  return CudaActivation::gate_up_forward(gate_up, activation);
}

std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                    const at::Tensor& gate_up,
                                                    Activation activation) {
  return CudaActivation::gate_up_backward(grad_h, gate_up, activation);
}

}  // namespace weft::kernels::cuda
