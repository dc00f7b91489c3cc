// The suites of the CUDA kernels on the emulator. WEFT_EMULATED_ORDER is the order in which the
// threads of a block run: forward, reverse, or the seed of a random one. These three emulate sm_90,
// sm_80 and sm_100.
#include "activation_entry.h"
#include "activation_suite.h"
#include "cross_entropy_entry.h"
#include "cross_entropy_suite.h"
#include "cuda_emulator.h"
#include "dropout_entry.h"
#include "dropout_suite.h"
#include "float_codes_entry.h"
#include "launch_device.h"
#include "norm_entry.h"
#include "norm_suite.h"
#include "optimizer_step_entry.h"
#include "optimizer_step_suite.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace weft::kernels::testing {
namespace {

// Tensors are in the CPU's memory, which is the memory of the emulated device.
using EmulatedDevice = cuda::LaunchDevice<c10::DeviceType::CPU>;
using Activations = detail::ActivationEntry<EmulatedDevice>;
using CrossEntropies = detail::CrossEntropyEntry<EmulatedDevice>;
using Norms = detail::NormEntry<EmulatedDevice>;
using OptimizerSteps = detail::OptimizerStepEntry<EmulatedDevice>;
using FloatCodes = detail::FloatCodesEntry<EmulatedDevice>;
constexpr auto kDropout = detail::run_dropout<EmulatedDevice>;

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
  EXPECT_THROW(kDropout(x, 0.5, 1, {1, 8, 0, 8}), c10::Error);
  cuda_emulator::settings().is_capturing = false;
  EXPECT_EQ(kDropout(x, 0.5, 1, {1, 8, 0, 8}).numel(), 8);
}

// Each replay of a captured graph would make the same step.
TEST(Emulated, OptimizerStepRaisesWhileAGraphIsCaptured) {
  const at::Tensor parameter = at::ones({8});
  const at::Tensor buffer = at::zeros({8});
  const at::Tensor grad = at::ones({8});
  const std::optional<at::Tensor> none;
  const MomentumStep step = {
      .parameter = parameter,
      .grad = grad,
      .momentum_buffer = buffer,
      .momentum_scale = none,
      .low_bits = none,
      .lr = 1,
      .momentum = 0.5,
      .dampening = 0,
      .weight_decay = 0,
      .nesterov = false,
      .maximize = false,
      .place = {.step = 1, .seed = 0, .row = 0, .column = 0, .full_columns = 8}};
  cuda_emulator::settings().is_capturing = true;
  EXPECT_THROW(OptimizerSteps::momentum_step(step), c10::Error);
  cuda_emulator::settings().is_capturing = false;
  EXPECT_TRUE(at::equal(parameter, at::ones({8})));
  OptimizerSteps::momentum_step(step);
  EXPECT_TRUE(at::equal(parameter, at::zeros({8})));
}

}  // namespace

KernelsUnderTest kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .activation_forward = Activations::forward,
          .activation_backward = Activations::backward,
          .gated_forward = Activations::gated_forward,
          .gated_backward = Activations::gated_backward,
          .gate_up_forward = Activations::gate_up_forward,
          .gate_up_backward = Activations::gate_up_backward};
}

cross_entropy::KernelsUnderTest cross_entropy::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .statistics = CrossEntropies::statistics,
          .gradient = CrossEntropies::gradient};
}

norm::KernelsUnderTest norm::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .forward = Norms::forward,
          .backward = Norms::backward};
}

optimizer::KernelsUnderTest optimizer::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .adam_step = OptimizerSteps::adam_step,
          .momentum_step = OptimizerSteps::momentum_step,
          .split_float = FloatCodes::split_float,
          .join_float = FloatCodes::join_float,
          .quantize_blocks = FloatCodes::quantize_blocks,
          .dequantize_blocks = FloatCodes::dequantize_blocks};
}

dropout::KernelsUnderTest dropout::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .dropout = kDropout};
}

}  // namespace weft::kernels::testing
