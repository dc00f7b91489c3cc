// The optimizer steps' kernels on the CPU: the suite, and every instruction set.
#include "float_codes_job.h"
#include "instruction_sets.h"
#include "optimizer_step_entry.h"
#include "optimizer_step_reference.h"
#include "optimizer_step_suite.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

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

// Numbers, NaN of any payload as one.
at::Tensor comparable(const at::Tensor& x) { return x.is_floating_point() ? x.nan_to_num(0.5) : x; }

// Puts numbers that are not finite, subnormal or 0 into the first rows of a tensor.
void put_special_numbers(const at::Tensor& x) {
  if (!x.is_floating_point()) return;
  using Limits = std::numeric_limits<float>;
  int64_t column = 3;
  for (const float value : {Limits::infinity(),
                            Limits::quiet_NaN(),
                            -Limits::signaling_NaN(),
                            0.0F,
                            -0.0F,
                            1e-41F,
                            3e38F}) {
    x[0].narrow(0, column, 2).fill_(value);
    x[1].narrow(0, 400 + column, 2).fill_(value);
    column += 7;
  }
}

// The positions of the elements pass a multiple of 2^16 within a block.
TEST(OptimizerStepInstructionSets, GiveTheSameBits) {
  using optimizer::States;
  using optimizer::Weights;
  const auto sets = cpu::supported_instruction_sets();
  for (const auto states : {States::kFloat32, States::kBFloat16, States::kCodes}) {
    for (const auto weights :
         {Weights::kFloat32, Weights::kBFloat16, Weights::kSplit16, Weights::kSplit8}) {
      for (const int options : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const bool is_first_step = options >= 4;
        const StepPlace place = {.step = is_first_step ? 1 : 4,
                                 .seed = 3,
                                 .row = 0,
                                 .column = 65000,
                                 .full_columns = 70000};
        const bool has_bfloat16_grad = weights != Weights::kFloat32 && options % 4 < 2;
        const auto start =
            optimizer::random_tensors({weights, has_bfloat16_grad, states}, {4, 701});
        for (const auto& each : {start.parameter, start.grad, start.first, start.second}) {
          put_special_numbers(each);
        }
        std::vector<at::Tensor> expected;
        for (auto set = sets.rbegin(); set != sets.rend(); ++set) {
          SCOPED_TRACE(set->name);
          const auto actual = start.copy_on(at::kCPU);
          const auto adam = detail::adam_step_job(actual.adam(place, options % 2 == 0));
          const int64_t num_blocks = adam.num_rows * adam.blocks_per_row();
          set->loops.optimizer.adam_step(adam, 0, num_blocks);
          auto momentum_step = actual.momentum(place, options % 2 == 0);
          momentum_step.maximize = options % 2 == 1;
          const auto momentum = detail::momentum_step_job(momentum_step);
          set->loops.optimizer.momentum_step(momentum, 0, num_blocks);
          if (expected.empty()) expected = actual.changed();
          for (std::size_t i = 0; i < expected.size(); ++i) {
            EXPECT_TRUE(at::equal(comparable(actual.changed()[i]), comparable(expected[i]))) << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels::testing
