#include "float_codes_entry.h"
#include "instruction_sets.h"
#include "optimizer_step_entry.h"

#include <ATen/Parallel.h>

// The optimizer steps and the conversions of their formats.
namespace weft::kernels::cpu {
namespace {

constexpr int64_t kBlocksPerThread = 64;  // of 256 elements

const OptimizerLoops& optimizer_loops() {
  static const OptimizerLoops widest = supported_instruction_sets().front().loops.optimizer;
  return widest;
}

template <typename Job, typename Loop>
void run_blocks(const Job& job, const Loop& loop) {
  const int64_t num_blocks = job.num_rows * job.blocks_per_row();
  at::parallel_for(0, num_blocks, kBlocksPerThread, [&](int64_t first, int64_t last) {
    loop(job, first, last);
  });
}

struct OptimizerDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  static void run(const detail::AdamStepJob& job, c10::Device /*device*/) {
    run_blocks(job, optimizer_loops().adam_step);
  }
  static void run(const detail::MomentumStepJob& job, c10::Device /*device*/) {
    run_blocks(job, optimizer_loops().momentum_step);
  }
  static void run(const detail::FloatCodesJob& job, c10::Device /*device*/) {
    run_blocks(job, optimizer_loops().float_codes);
  }
};

using Steps = detail::OptimizerStepEntry<OptimizerDevice>;
using Codes = detail::FloatCodesEntry<OptimizerDevice>;

}  // namespace

void adam_step(const AdamStep& step) { Steps::adam_step(step); }

void momentum_step(const MomentumStep& step) { Steps::momentum_step(step); }

std::tuple<at::Tensor, at::Tensor> split_float(const at::Tensor& x, at::ScalarType low_dtype) {
  return Codes::split_float(x, low_dtype);
}

at::Tensor join_float(const at::Tensor& high, const at::Tensor& low) {
  return Codes::join_float(high, low);
}

std::tuple<at::Tensor, at::Tensor> quantize_blocks(const at::Tensor& x, bool signed_codes) {
  return Codes::quantize_blocks(x, signed_codes);
}

at::Tensor dequantize_blocks(const at::Tensor& codes, const at::Tensor& scale) {
  return Codes::dequantize_blocks(codes, scale);
}

}  // namespace weft::kernels::cpu
