// The suites of the CUDA kernels on the emulator. WEFT_EMULATED_ORDER is the order in which the
// threads of a block run: forward, reverse, or the seed of a random one. These three emulate sm_90,
// sm_80 and sm_100.
#include "activation_suite.h"
#include "cross_entropy_suite.h"
#include "cuda_emulator.h"
#include "dropout_suite.h"
#include "emulated_kernels.h"
#include "norm_suite.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace weft::kernels::testing {
namespace {

class EmulatorOrder : public ::testing::Environment {
 public:
  void SetUp() override {
    const char* given = std::getenv("WEFT_EMULATED_ORDER");
    const std::string order = given == nullptr ? "forward" : given;
    auto& settings = cuda_emulator::settings();
    settings.order = order == "forward"   ? cuda_emulator::Order::kForward
                     : order == "reverse" ? cuda_emulator::Order::kReverse
                                          : cuda_emulator::Order::kRandom;
    if (settings.order == cuda_emulator::Order::kRandom) settings.seed = std::stoull(order);
    settings.device = order == "forward"   ? cuda_emulator::kSm90
                      : order == "reverse" ? cuda_emulator::kSm80
                                           : cuda_emulator::kSm100;
  }
};

const ::testing::Environment* const kOrder =
    ::testing::AddGlobalTestEnvironment(new EmulatorOrder);  // NOLINT: GoogleTest owns it

// Each replay of a captured graph would drop the same elements.
TEST(Emulated, DropoutRaisesWhileAGraphIsCaptured) {
  const at::Tensor x = at::ones({8});
  cuda_emulator::settings().is_capturing = true;
  EXPECT_THROW(emulated::dropout(x, 0.5, 1, {1, 8, 0, 8}), c10::Error);
  cuda_emulator::settings().is_capturing = false;
  EXPECT_EQ(emulated::dropout(x, 0.5, 1, {1, 8, 0, 8}).numel(), 8);
}

}  // namespace

KernelsUnderTest kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .activation_forward = emulated::activation_forward,
          .activation_backward = emulated::activation_backward,
          .gated_forward = emulated::gated_forward,
          .gated_backward = emulated::gated_backward,
          .gate_up_forward = emulated::gate_up_forward,
          .gate_up_backward = emulated::gate_up_backward};
}

cross_entropy::KernelsUnderTest cross_entropy::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .statistics = emulated::cross_entropy_statistics,
          .gradient = emulated::cross_entropy_gradient};
}

norm::KernelsUnderTest norm::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .forward = emulated::norm_forward,
          .backward = emulated::norm_backward};
}

dropout::KernelsUnderTest dropout::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .dropout = emulated::dropout};
}

}  // namespace weft::kernels::testing
