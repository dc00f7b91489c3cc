// The norms' kernels on the CPU: the suite, every instruction set, several numbers of threads, and
// errors.
#include "instruction_sets.h"
#include "norm_job.h"
#include "norm_suite.h"

#include <weft/kernels/norm.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <vector>

namespace weft::kernels::testing {

norm::KernelsUnderTest norm::kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .forward = cpu::norm_forward,
          .backward = cpu::norm_backward};
}

namespace {

constexpr int64_t kRows = 37;
constexpr int64_t kSize = 1100;  // two tiles and a partial one

struct NormInputs {
  at::Tensor x = at::randn({kRows, kSize}) + 3;
  at::Tensor residual = at::randn({kRows, kSize});
  at::Tensor weight = at::randn({kSize});
  at::Tensor bias = at::randn({kSize});
  at::Tensor grad_y = at::randn({kRows, kSize});
};

// Returns all results of the forward and of the backward.
std::vector<at::Tensor> run(const NormInputs& in, Norm norm) {
  const auto forward = cpu::norm_forward(
      {.x = in.x, .residual = in.residual, .weight = in.weight, .bias = in.bias, .eps = 1e-5},
      norm);
  const std::optional<at::Tensor> mean =
      norm == Norm::kLayer ? std::optional(forward.mean) : std::nullopt;
  const auto backward = cpu::norm_backward(
      in.grad_y,
      in.residual,
      {.norm_input = forward.sum, .weight = in.weight, .mean = mean, .rstd = forward.rstd},
      {.input = true, .params = true, .bias = true});
  return {forward.y, forward.sum, forward.rstd, backward.input, backward.params};
}

TEST(NormThreads, GiveTheSameBits) {
  const NormInputs in;
  const int num_threads = at::get_num_threads();
  for (const auto norm : {Norm::kRms, Norm::kLayer}) {
    at::set_num_threads(1);
    const auto one = run(in, norm);
    at::set_num_threads(3);
    const auto three = run(in, norm);
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
  }
  at::set_num_threads(num_threads);
}

TEST(NormInstructionSets, AgreeWithEachOther) {
  const NormInputs in;
  for (const auto& set : cpu::supported_instruction_sets()) {
    SCOPED_TRACE(set.name);
    const auto expected = run(in, Norm::kLayer);
    at::Tensor y = at::empty_like(in.x);
    at::Tensor sum = at::empty_like(in.x);
    at::Tensor grad = at::empty_like(in.x);
    at::Tensor mean = at::empty({kRows});
    at::Tensor rstd = at::empty({kRows});
    at::Tensor params = at::zeros({2, kSize});
    const detail::NormForwardJob forward = {.type = detail::StorageType::kFloat32,
                                            .centered = true,
                                            .params_in_compute_type = true,
                                            .eps = 1e-5,
                                            .num_rows = kRows,
                                            .row_size = kSize,
                                            .x = in.x.const_data_ptr(),
                                            .residual = in.residual.const_data_ptr(),
                                            .weight = in.weight.const_data_ptr(),
                                            .bias = in.bias.const_data_ptr(),
                                            .sum = sum.mutable_data_ptr(),
                                            .y = y.mutable_data_ptr(),
                                            .mean = mean.mutable_data_ptr(),
                                            .rstd = rstd.mutable_data_ptr()};
    const detail::NormBackwardJob backward = {.type = detail::StorageType::kFloat32,
                                              .centered = true,
                                              .params_in_compute_type = true,
                                              .has_bias = true,
                                              .num_rows = kRows,
                                              .row_size = kSize,
                                              .grad_y = in.grad_y.const_data_ptr(),
                                              .grad_sum = in.residual.const_data_ptr(),
                                              .v = sum.const_data_ptr(),
                                              .weight = in.weight.const_data_ptr(),
                                              .mean = mean.const_data_ptr(),
                                              .rstd = rstd.const_data_ptr(),
                                              .grad_v = grad.mutable_data_ptr()};
    // In two ranges, as with two threads.
    set.loops.norm_forward(forward, 0, 20);
    set.loops.norm_forward(forward, 20, kRows);
    set.loops.norm_backward(backward, 0, 11, params.mutable_data_ptr());
    set.loops.norm_backward(backward, 11, kRows, params.mutable_data_ptr());
    EXPECT_TRUE(at::allclose(y, expected[0], 1e-5, 1e-5));
    EXPECT_TRUE(at::equal(sum, expected[1]));
    EXPECT_TRUE(at::allclose(rstd, expected[2], 1e-6, 0));
    EXPECT_TRUE(at::allclose(grad, expected[3], 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(params, expected[4], 1e-4, 1e-4));
  }
}

TEST(NormErrors, NameTheMismatch) {
  const NormInputs in;
  const auto error_of = [&](const at::Tensor& x, const std::optional<at::Tensor>& weight) {
    try {
      cpu::norm_forward({.x = x, .residual = {}, .weight = weight, .bias = {}, .eps = 1e-5},
                        Norm::kRms);
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("none");
  };
  EXPECT_EQ(error_of(in.x, in.weight.slice(0, 0, 3)),
            "norm got weight of shape [3] for x of shape [37, 1100]; pass one dim, as long as the "
            "last dim of x.");
  EXPECT_EQ(error_of(in.x, in.weight.to(at::kDouble)),
            "norm got weight of dtype Double with x of dtype Float; pass the dtype of x, or "
            "float32 if x is bfloat16 or float16.");
  EXPECT_EQ(error_of(in.x.to(at::kLong), {}),
            "norm got x of dtype Long; convert to float32, float64, bfloat16 or float16.");
  EXPECT_EQ(error_of(in.x.to(at::kMeta), {}),
            "norm got x on meta in the kernel for cpu; call the kernel of the tensor's own "
            "device.");
}

}  // namespace
}  // namespace weft::kernels::testing
