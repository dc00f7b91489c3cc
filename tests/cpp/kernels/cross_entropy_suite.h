#pragma once

#include <weft/kernels/cross_entropy.h>

// cross_entropy_suite.cpp tests the kernels of one device. Each test executable links it and
// defines kernels_under_test().
namespace weft::kernels::testing::cross_entropy {

struct KernelsUnderTest {
  c10::DeviceType device;
  bool available;  // false: the suite is skipped, for `unavailable_reason`
  const char* unavailable_reason;
  at::Tensor (*statistics)(const CrossEntropyStatisticsArguments&);
  void (*gradient)(const CrossEntropyGradientArguments&, const at::Tensor&);
};

KernelsUnderTest kernels_under_test();

}  // namespace weft::kernels::testing::cross_entropy
