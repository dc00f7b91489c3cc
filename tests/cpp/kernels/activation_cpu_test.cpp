#include "activation_job.h"
#include "activation_reference.h"
#include "activation_suite.h"
#include "instruction_sets.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace weft::kernels::testing {

KernelsUnderTest kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .activation_forward = cpu::activation_forward,
          .activation_backward = cpu::activation_backward,
          .gated_forward = cpu::gated_forward,
          .gated_backward = cpu::gated_backward,
          .gate_up_forward = cpu::gate_up_forward,
          .gate_up_backward = cpu::gate_up_backward};
}

namespace {

constexpr Activation kActivations[] = {
    Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu};

TEST(ActivationKind, ParsesItsName) {
  for (const auto activation : kActivations) {
    EXPECT_EQ(parse_activation(name_of(activation)), activation);
  }
  EXPECT_EQ(parse_activation("SiLU"), std::nullopt);
  EXPECT_EQ(parse_activation(""), std::nullopt);
}

// The suite runs the widest instruction set of this processor; this test compares every supported
// one with it.
TEST(ActivationInstructionSets, AgreeWithEachOther) {
  const auto sets = cpu::supported_instruction_sets();
  ASSERT_STREQ(sets.back().name, "baseline");
  const at::Tensor gate = at::randn({37, 65}) * 4;
  const at::Tensor up = at::randn({37, 65});
  const at::Tensor grad_h = at::randn({37, 65});
  for (const auto& set : sets) {
    for (const auto activation : kActivations) {
      SCOPED_TRACE(std::string(set.name) + " " + name_of(activation));
      const auto [grad_gate, grad_up, h] = cpu::gated_backward(grad_h, gate, up, activation);
      at::Tensor actual = at::empty({3, 37, 65});
      auto* out = actual.mutable_data_ptr<float>();
      const detail::ActivationJob job = {.op = detail::ActivationOp::kGatedBackward,
                                         .activation = activation,
                                         .type = detail::StorageType::kFloat32,
                                         .num_elements = gate.numel(),
                                         .grad_h = grad_h.const_data_ptr(),
                                         .x = gate.const_data_ptr(),
                                         .up = up.const_data_ptr(),
                                         .h = out,
                                         .grad_x = out + gate.numel(),
                                         .grad_up = out + 2 * gate.numel()};
      // In two ranges that meet in the middle of a row, as with two threads.
      set.loops.activation(job, 0, 1000);
      set.loops.activation(job, 1000, job.num_elements);
      EXPECT_TRUE(at::allclose(actual, at::stack({h, grad_gate, grad_up}), 1e-6, 1e-6));
    }
  }
}

TEST(ActivationThreads, GiveTheSameBits) {
  const at::Tensor gate = at::randn({301, 500});
  const at::Tensor up = at::randn({301, 500});
  const auto run = [&] { return cpu::gated_forward(gate, up, Activation::kGelu); };
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = run();
  at::set_num_threads(3);
  const at::Tensor three = run();
  at::set_num_threads(num_threads);
  EXPECT_TRUE(at::equal(one, three));
}

}  // namespace
}  // namespace weft::kernels::testing
