#pragma once

#include <weft/kernels/norm.h>

// norm_suite.cpp tests the kernels of one device. Each test executable links it and defines
// kernels_under_test().
namespace weft::kernels::testing::norm {

struct KernelsUnderTest {
  c10::DeviceType device;
  bool available;  // false: the suite is skipped, for `unavailable_reason`
  const char* unavailable_reason;
  NormResult (*forward)(const NormArguments&, Norm);
  NormGradients (*backward)(const at::Tensor&,
                            const std::optional<at::Tensor>&,
                            const NormSaved&,
                            NormWanted);
};

KernelsUnderTest kernels_under_test();

}  // namespace weft::kernels::testing::norm
