#pragma once

#include <weft/kernels/dropout.h>

// dropout_suite.cpp tests the kernel of one device. Each test executable links it and defines
// kernels_under_test().
namespace weft::kernels::testing::dropout {

struct KernelsUnderTest {
  c10::DeviceType device;
  bool available;  // false: the suite is skipped, for `unavailable_reason`
  const char* unavailable_reason;
  at::Tensor (*dropout)(const at::Tensor&, double, uint64_t, const DropoutPlace&);
};

KernelsUnderTest kernels_under_test();

}  // namespace weft::kernels::testing::dropout
