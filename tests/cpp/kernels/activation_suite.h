#pragma once

#include <weft/kernels/activation.h>

#include <tuple>

// activation_suite.cpp tests the kernels of one device. Each test executable links it and defines
// kernels_under_test().
namespace weft::kernels::testing {

struct KernelsUnderTest {
  c10::DeviceType device;
  bool available;  // false: the suite is skipped, for `unavailable_reason`
  const char* unavailable_reason;
  at::Tensor (*activation_forward)(const at::Tensor&, Activation);
  std::tuple<at::Tensor, at::Tensor> (*activation_backward)(const at::Tensor&,
                                                            const at::Tensor&,
                                                            Activation);
  at::Tensor (*gated_forward)(const at::Tensor&, const at::Tensor&, Activation);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> (*gated_backward)(const at::Tensor&,
                                                                   const at::Tensor&,
                                                                   const at::Tensor&,
                                                                   Activation);
  at::Tensor (*gate_up_forward)(const at::Tensor&, Activation);
  std::tuple<at::Tensor, at::Tensor> (*gate_up_backward)(const at::Tensor&,
                                                         const at::Tensor&,
                                                         Activation);
};

KernelsUnderTest kernels_under_test();

}  // namespace weft::kernels::testing
