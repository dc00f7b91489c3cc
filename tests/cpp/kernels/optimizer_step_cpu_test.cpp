// The optimizer steps' kernels on the CPU: the suite, and every instruction set.
#include "float_codes_job.h"
#include "instruction_sets.h"
#include "optimizer_step_entry.h"
#include "optimizer_step_reference.h"
#include "optimizer_step_suite.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace weft::kernels::testing {

optimizer::KernelsUnderTest optimizer::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .adam_step = cpu::adam_step,
          .momentum_step = cpu::momentum_step,
          .split_float = cpu::split_float,
          .join_float = cpu::join_float,
          .quantize_blocks = cpu::quantize_blocks,
          .dequantize_blocks = cpu::dequantize_blocks};
}

namespace {

// Bits differ only by fused multiply-adds, which all sets but the baseline have.
TEST(OptimizerStepInstructionSets, AgreeWithEachOther) {
  using optimizer::States;
  using optimizer::Weights;
  const StepPlace place = {.step = 4, .seed = 3, .row = 0, .column = 0, .full_columns = 701};
  for (const auto states : {States::kFloat32, States::kBFloat16, States::kCodes}) {
    for (const auto weights : {Weights::kFloat32, Weights::kBFloat16, Weights::kSplit8}) {
      const auto start = optimizer::random_tensors({weights, false, states}, {3, 701});
      const auto expected = start.copy_on(at::kCPU);
      cpu::adam_step(expected.adam(place, true));
      for (const auto& set : cpu::supported_instruction_sets()) {
        SCOPED_TRACE(set.name);
        const auto actual = start.copy_on(at::kCPU);
        const auto job = detail::adam_step_job(actual.adam(place, true));
        set.loops.optimizer.adam_step(job, 0, job.num_rows * job.blocks_per_row());
        const auto left = actual.changed();
        const auto right = expected.changed();
        for (std::size_t i = 0; i < left.size(); ++i) {
          const at::Tensor difference =
              (left[i].to(at::kFloat) - right[i].to(at::kFloat)).abs() /
              (right[i].is_floating_point() ? right[i].to(at::kFloat).abs() + 1e-3 : at::ones({}));
          // Rounded to a neighbour at few elements; of split floats, the lower bits then differ.
          EXPECT_LE(at::count_nonzero(difference > 1e-5).item<int64_t>(), left[i].numel() / 50)
              << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels::testing
