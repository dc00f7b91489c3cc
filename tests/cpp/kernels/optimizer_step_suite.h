#pragma once

#include <weft/kernels/float_codes.h>
#include <weft/kernels/optimizer_step.h>

// optimizer_step_suite.cpp tests the kernels of one device. Each test executable links it and
// defines kernels_under_test().
namespace weft::kernels::testing::optimizer {

struct KernelsUnderTest {
  c10::DeviceType device;
  bool available;  // false: the suite is skipped, for `unavailable_reason`
  const char* unavailable_reason;
  void (*adam_step)(const AdamStep&);
  void (*momentum_step)(const MomentumStep&);
  std::tuple<at::Tensor, at::Tensor> (*split_float)(const at::Tensor&, at::ScalarType);
  at::Tensor (*join_float)(const at::Tensor&, const at::Tensor&);
  std::tuple<at::Tensor, at::Tensor> (*quantize_blocks)(const at::Tensor&, bool);
  at::Tensor (*dequantize_blocks)(const at::Tensor&, const at::Tensor&);
};

KernelsUnderTest kernels_under_test();

}  // namespace weft::kernels::testing::optimizer
