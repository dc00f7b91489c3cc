#include "instruction_sets.h"
#include "norm_entry.h"

#include <weft/kernels/norm.h>

#include <ATen/Parallel.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kNormElementsPerThread = 32768;  // as in activation.cpp
// The parameters' gradients are summed within blocks of rows, and then over the blocks, so results
// do not depend on the number of threads.
constexpr int64_t kMaxBlocks = 64;
constexpr int64_t kMinRowsPerBlock = 8;

const Loops& norm_loops() {
  static const Loops widest = supported_instruction_sets().front().loops;
  return widest;
}

struct NormDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  static at::Tensor params(const at::Tensor& params, at::ScalarType compute_type) {
    return params.to(compute_type);
  }

  static void run(const detail::NormForwardJob& job, c10::Device /*device*/) {
    const int64_t grain = std::max<int64_t>(1, kNormElementsPerThread / job.row_size);
    at::parallel_for(0, job.num_rows, grain, [&job](int64_t first, int64_t last) {
      norm_loops().norm_forward(job, first, last);
    });
  }

  static at::Tensor run(const detail::NormBackwardJob& job,
                        int num_params,
                        const at::TensorOptions& options) {
    const int64_t rows_per_block =
        std::max(kMinRowsPerBlock, (job.num_rows + kMaxBlocks - 1) / kMaxBlocks);
    const int64_t num_blocks = (job.num_rows + rows_per_block - 1) / rows_per_block;
    const int64_t grain =
        std::max<int64_t>(1, kNormElementsPerThread / (rows_per_block * job.row_size));
    at::Tensor sums;
    char* data = nullptr;
    int64_t bytes_per_block = 0;
    if (num_params > 0) {
      sums = at::zeros({num_blocks, num_params, job.row_size}, options);
      data = static_cast<char*>(sums.mutable_data_ptr());
      bytes_per_block = num_params * job.row_size * static_cast<int64_t>(sums.element_size());
    }
    at::parallel_for(0, num_blocks, grain, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        norm_loops().norm_backward(job,
                                   block * rows_per_block,
                                   std::min((block + 1) * rows_per_block, job.num_rows),
                                   data == nullptr ? nullptr : data + block * bytes_per_block);
      }
    });
    if (num_params == 0) return {};
    return num_blocks == 1 ? sums[0] : sums.sum(0);
  }
};

using CpuNorm = detail::NormEntry<NormDevice>;

}  // namespace

NormResult norm_forward(const NormArguments& arguments, Norm norm) {
  return CpuNorm::forward(arguments, norm);
}

NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted) {
  return CpuNorm::backward(grad_y, grad_sum, saved, wanted);
}

}  // namespace weft::kernels::cpu
