#include "dropout_entry.h"
#include "instruction_sets.h"

#include <weft/kernels/dropout.h>

#include <ATen/Parallel.h>

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kDropoutElementsPerThread = 16384;

struct DropoutDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  static void run(const detail::DropoutJob& job, c10::Device /*device*/) {
    static const auto loops = supported_instruction_sets().front().loops.dropout;
    at::parallel_for(
        0, job.num_elements, kDropoutElementsPerThread, [&job](int64_t first, int64_t last) {
          loops(job, first, last);
        });
  }
};

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place) {
  return detail::run_dropout<DropoutDevice>(x, p, seed, place);
}

}  // namespace weft::kernels::cpu
