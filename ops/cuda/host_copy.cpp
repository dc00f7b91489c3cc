// Copies CUDA tensors to pinned host memory, on a stream of their own.

#include "pipeline/host_copy.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>

namespace weft::ops {

namespace {

c10::cuda::CUDAStream copy_stream_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<c10::DeviceIndex, c10::cuda::CUDAStream>();
  const std::lock_guard lock(mutex);
  auto found = streams.find(device);
  if (found == streams.end()) {
    found = streams.emplace(device, c10::cuda::getStreamFromPool(false, device)).first;
  }
  return found->second;
}

// Blocks the copy thread without spinning, and without failing the capture of a graph by another
// thread. No guard restores the thread's mode: CUDA may be unloaded meanwhile.
void wait_for(const at::cuda::CUDAEvent& event) {
  auto mode = cudaStreamCaptureModeThreadLocal;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  event.synchronize();
}

HostCopy start(const at::Tensor& tensor) {
  const c10::cuda::CUDAGuard device(tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
      "weft: got a message to send while a CUDA graph is captured, but the host sends messages; "
      "send it outside of the capture.");
  const auto stream = copy_stream_of(tensor.device().index());
  at::cuda::CUDAEvent computed;
  computed.record();
  computed.block(stream);
  auto host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  const auto copied =
      std::make_shared<at::cuda::CUDAEvent>(cudaEventDisableTiming | cudaEventBlockingSync);
  const c10::cuda::CUDAStreamGuard guard(stream);
  host.copy_(tensor, /*non_blocking=*/true);
  tensor.record_stream(stream);
  copied->record(stream);
  return {std::move(host), [copied] { wait_for(*copied); }};
}

const bool kIsSet = (set_cuda_host_copy(&start), true);

}  // namespace

}  // namespace weft::ops
