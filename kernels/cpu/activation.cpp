#include "activation_entry.h"
#include "instruction_sets.h"

#include <weft/kernels/activation.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

namespace weft::kernels::cpu {
namespace {

// Below this size a second thread costs more than it saves; also torch's elementwise grain size.
constexpr int64_t kActivationElementsPerThread = 32768;

// Returns the address `bytes` after `data`, or null for null.
template <typename Void>
Void* advanced(Void* data, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + bytes;
}

// Returns the job of one row of a job in which the rows of gate and up alternate.
detail::ActivationJob row_job(const detail::ActivationJob& job, int64_t row_idx) {
  const int64_t bytes = row_idx * job.row_size * detail::element_bytes(job.type);
  return {.op = job.op,
          .activation = job.activation,
          .type = job.type,
          .num_elements = job.row_size,
          .grad_h = advanced(job.grad_h, bytes),
          .x = advanced(job.x, 2 * bytes),
          .up = advanced(job.up, 2 * bytes),
          .h = advanced(job.h, bytes),
          .grad_x = advanced(job.grad_x, 2 * bytes),
          .grad_up = advanced(job.grad_up, 2 * bytes)};
}

struct ActivationDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  // Not at::empty: a call through the dispatcher costs as much as a small kernel.
  static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like) {
    return at::Tensor(at::detail::empty_cpu(sizes, like.scalar_type()));
  }

  static void run(const detail::ActivationJob& job, c10::Device /*device*/) {
    static const auto loops = supported_instruction_sets().front().loops.activation;
    if (job.row_size > 0) {
      const int64_t num_rows = job.num_elements / job.row_size;
      const int64_t rows_per_thread =
          std::max<int64_t>(kActivationElementsPerThread / job.row_size, 1);
      at::parallel_for(0, num_rows, rows_per_thread, [&job](int64_t first, int64_t last) {
        for (int64_t row_idx = first; row_idx < last; ++row_idx) {
          loops(row_job(job, row_idx), 0, job.row_size);
        }
      });
      return;
    }
    at::parallel_for(
        0, job.num_elements, kActivationElementsPerThread, [&job](int64_t first, int64_t last) {
          loops(job, first, last);
        });
  }
};

using CpuActivation = detail::ActivationEntry<ActivationDevice>;

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, Activation activation) {
  return CpuActivation::forward(x, activation);
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation) {
  return CpuActivation::backward(grad_h, x, activation);
}

at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  return CpuActivation::gated_forward(gate, up, activation);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation) {
  return CpuActivation::gated_backward(grad_h, gate, up, activation);
}

at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation) {
  return CpuActivation::gate_up_forward(gate_up, activation);
}

std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                    const at::Tensor& gate_up,
                                                    Activation activation) {
  return CpuActivation::gate_up_backward(grad_h, gate_up, activation);
}

}  // namespace weft::kernels::cpu
