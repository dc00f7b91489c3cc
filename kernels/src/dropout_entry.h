#pragma once

#include "dropout_job.h"
#include "entry.h"

#include <weft/kernels/dropout.h>

#include <algorithm>

// Checks a tensor and builds a DropoutJob, for all devices. `Device` supplies kType and
// run(const DropoutJob& job, c10::Device device), for jobs with elements.
namespace weft::kernels::detail {

// Throws c10::Error if the dtype of x is not supported or x is not on a device of type `device`.
void check_dropout(const at::Tensor& x, c10::DeviceType device);
// Returns an uninitialized contiguous tensor of the shape and dtype of x.
at::Tensor empty_like_x(const at::Tensor& x);

template <typename Device>
at::Tensor run_dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place) {
  check_dropout(x, Device::kType);
  at::Tensor y = empty_like_x(x);
  if (x.numel() == 0) return y;
  if (p >= 1) return y.zero_();
  const ContiguousOperand contiguous_x(&x);
  Device::run({.type = storage_type(x.scalar_type()),
               .num_elements = x.numel(),
               .run_size = std::max<int64_t>(1, place.size * place.inner),
               .full_run_size = place.full_size * place.inner,
               .run_begin = place.begin * place.inner,
               .seed = seed,
               .threshold = static_cast<uint64_t>(p * 0x1p32),
               .scale = 1 / (1 - p),
               .x = contiguous_x.data(),
               .y = y.mutable_data_ptr()},
              x.device());
  return y;
}

}  // namespace weft::kernels::detail
