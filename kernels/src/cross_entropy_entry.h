#pragma once

#include "cross_entropy_job.h"
#include "entry.h"

#include <weft/kernels/cross_entropy.h>

// Checks tensors and builds the jobs of the cross-entropy, for all devices. `Device` supplies:
//
//   struct Device {
//     static constexpr c10::DeviceType kType;
//     static void run(const CrossEntropyStatisticsJob& job, c10::Device device);  // has rows
//     static void run(const CrossEntropyGradientJob& job, c10::Device device);  // has elements
//   };
namespace weft::kernels::detail {

// Throw c10::Error for shapes, dtypes or devices other than <weft/kernels/cross_entropy.h>
// requires; `device` is the type of device that the logits must be on.
void check_statistics(const CrossEntropyStatisticsArguments& arguments, c10::DeviceType device);
void check_gradient(const CrossEntropyGradientArguments& arguments,
                    const at::Tensor& grad_logits,
                    c10::DeviceType device);

// Returns an uninitialized [tokens, 4] in the compute type of the logits.
at::Tensor empty_statistics(const at::Tensor& logits);

// Returns the logits with contiguous rows, as a job reads them; a copy if necessary.
at::Tensor with_contiguous_rows(const at::Tensor& logits);

// Returns `target` contiguous and as int64; a copy if necessary.
at::Tensor as_targets(const at::Tensor& target);
// Returns `values` contiguous and in the compute type of the logits; a copy if necessary.
at::Tensor in_compute_type(const at::Tensor& values, const at::Tensor& logits);

template <typename Device>
struct CrossEntropyEntry {
  static at::Tensor statistics(const CrossEntropyStatisticsArguments& arguments) {
    check_statistics(arguments, Device::kType);
    const at::Tensor result = empty_statistics(arguments.logits);
    if (result.numel() == 0) return result;
    const at::Tensor logits = with_contiguous_rows(arguments.logits);
    const at::Tensor target = as_targets(arguments.target);
    Device::run(CrossEntropyStatisticsJob{.type = storage_type(logits.scalar_type()),
                                          .wants_sum = arguments.wants_sum,
                                          .num_rows = logits.size(0),
                                          .row_size = logits.size(1),
                                          .row_stride = logits.stride(0),
                                          .targets = {.target = target.const_data_ptr<int64_t>(),
                                                      .vocab_start = arguments.vocab_start,
                                                      .ignore_index = arguments.ignore_index,
                                                      .row_size = logits.size(1)},
                                          .logits = logits.const_data_ptr(),
                                          .statistics = result.mutable_data_ptr()},
                logits.device());
    return result;
  }

  static void gradient(const CrossEntropyGradientArguments& arguments,
                       const at::Tensor& grad_logits) {
    check_gradient(arguments, grad_logits, Device::kType);
    if (grad_logits.numel() == 0) return;
    const at::Tensor logits = with_contiguous_rows(arguments.logits);
    const at::Tensor target = as_targets(arguments.target);
    const at::Tensor grad_losses = in_compute_type(arguments.grad_losses, logits);
    const at::Tensor largest = in_compute_type(arguments.normalizers.select(0, 0), logits);
    const at::Tensor log_sum = in_compute_type(arguments.normalizers.select(0, 1), logits);
    const auto num_classes = static_cast<double>(arguments.num_classes);
    Device::run(
        CrossEntropyGradientJob{.type = storage_type(logits.scalar_type()),
                                .num_rows = logits.size(0),
                                .row_size = logits.size(1),
                                .row_stride = logits.stride(0),
                                .smoothing = arguments.label_smoothing,
                                .smoothing_per_class = arguments.label_smoothing / num_classes,
                                .targets = {.target = target.const_data_ptr<int64_t>(),
                                            .vocab_start = arguments.vocab_start,
                                            .ignore_index = arguments.ignore_index,
                                            .row_size = logits.size(1)},
                                .logits = logits.const_data_ptr(),
                                .grad_losses = grad_losses.const_data_ptr(),
                                .largest = largest.const_data_ptr(),
                                .log_sum = log_sum.const_data_ptr(),
                                .grad_logits = grad_logits.mutable_data_ptr()},
        logits.device());
  }
};

}  // namespace weft::kernels::detail
