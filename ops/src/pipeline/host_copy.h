#pragma once

// Copies of tensors to host memory, from where a group sends them. The copy of a CUDA tensor does
// not block the host: a stream copies it to pinned memory, and a thread waits for the copy. Each
// device has one such stream and one such thread, so copies end, and tasks run, in the order in
// which they were started.

#include <weft/ops/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <exception>
#include <functional>

namespace weft::ops {

struct HostCopy {
  at::Tensor tensor;  // contiguous; complete after wait()
  // Blocks the copy thread of the device until the copy has ended; empty if it has. Errors: the
  // device's.
  std::function<void()> wait;
};

// Copies a contiguous tensor to the host; returns a tensor that is there already. The copy of a
// CUDA tensor follows the work of the current stream; until it has ended, `tensor` must not be
// changed, but may be freed. For other devices, and without libweft_ops_cuda.so, the copy has
// ended.
HostCopy start_copy_to_host(const at::Tensor& tensor);

// Calls `wait` on the copy thread of the device, after its earlier calls, and then `finish` with
// the error of `wait` or null. `finish` neither blocks nor throws.
void run_on_copy_thread(const c10::Device& device,
                        std::function<void()> wait,
                        std::function<void(std::exception_ptr)> finish);

// Ends the calls of the copy threads, without waiting for the device. For a process that exits:
// what `finish` uses or releases, such as CUDA events, is destroyed while the threads live.
void stop_copy_threads();

// Registers the CUDA implementation. Called once, when libweft_ops_cuda.so is loaded.
WEFT_OPS_API void set_cuda_host_copy(HostCopy (*start)(const at::Tensor& tensor));

}  // namespace weft::ops
