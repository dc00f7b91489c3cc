#pragma once

#include <weft/kernels/activation.h>
#include <weft/kernels/cross_entropy.h>
#include <weft/kernels/dropout.h>
#include <weft/kernels/norm.h>

// The CUDA kernels of kernels/cuda for CPU tensors, run by the emulator in
// tests/support/cuda_emulator: the functions of weft::kernels::cuda, with their arguments and
// results.
namespace weft::kernels::emulated {

at::Tensor activation_forward(const at::Tensor& x, Activation activation);
std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation);
at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation);
std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation);
at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation);
std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                    const at::Tensor& gate_up,
                                                    Activation activation);

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments);
void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits);

NormResult norm_forward(const NormArguments& arguments, Norm norm);
NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted);

at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place);

}  // namespace weft::kernels::emulated
