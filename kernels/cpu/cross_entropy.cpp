#include "cross_entropy_entry.h"
#include "instruction_sets.h"

#include <weft/kernels/cross_entropy.h>

#include <ATen/Parallel.h>

#include <algorithm>

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kCrossEntropyElementsPerThread = 32768;  // as in activation.cpp

const Loops& cross_entropy_loops() {
  static const Loops widest = supported_instruction_sets().front().loops;
  return widest;
}

// Each row is processed by one thread, so results do not depend on the number of threads.
template <typename Run, typename Job>
void for_each_row(const Job& job, Run run) {
  const int64_t grain =
      std::max<int64_t>(1, kCrossEntropyElementsPerThread / std::max<int64_t>(1, job.row_size));
  at::parallel_for(
      0, job.num_rows, grain, [&](int64_t first, int64_t last) { run(job, first, last); });
}

struct CrossEntropyDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  static void run(const detail::CrossEntropyStatisticsJob& job, c10::Device /*device*/) {
    for_each_row(job, cross_entropy_loops().cross_entropy_statistics);
  }

  static void run(const detail::CrossEntropyGradientJob& job, c10::Device /*device*/) {
    for_each_row(job, cross_entropy_loops().cross_entropy_gradient);
  }
};

using CpuCrossEntropy = detail::CrossEntropyEntry<CrossEntropyDevice>;

}  // namespace

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments) {
  return CpuCrossEntropy::statistics(arguments);
}

void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits) {
  CpuCrossEntropy::gradient(arguments, grad_logits);
}

}  // namespace weft::kernels::cpu
