#include "dropout_launch.h"
#include "elementwise.cuh"
#include "philox.h"
#include "vector_access.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace weft::kernels::cuda {
namespace {

using detail::DropoutJob;

// Returns the position of element `begin` in the unsharded tensor. A division of 64-bit integers
// takes about as long as the random numbers of a pack, and few tensors need it.
__device__ __forceinline__ int64_t full_position(const DropoutJob& job, int64_t begin) {
  if (job.run_size == job.num_elements) return job.run_begin + begin;
  const int64_t run_idx =
      job.num_elements <= UINT32_MAX
          ? int64_t{static_cast<uint32_t>(begin) / static_cast<uint32_t>(job.run_size)}
          : begin / job.run_size;
  return run_idx * job.full_run_size + job.run_begin + (begin - run_idx * job.run_size);
}

// The `Operation` of elementwise.cuh.
template <typename Element>
struct DropoutOperation {
  using Storage = Element;
  using Scalar = ScalarOf<Storage>;

  // Processes elements [begin, begin + kWidth), which lie in one run. A pack of 4 or 8 elements
  // whose position is a multiple of 4 needs one Philox counter for every 4 elements.
  template <int kWidth>
  static __device__ __forceinline__ void run(const DropoutJob& job, int64_t begin) {
    const int64_t position = full_position(job, begin);
    const Scalar scale = static_cast<Scalar>(job.scale);
    Scalar values[kWidth];
    load_pack<Storage>(job.x, begin, values);
    if (kWidth % 4 == 0 && (position & 3) == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const auto bits = detail::philox(static_cast<uint64_t>((position + i) >> 2), job.seed);
#pragma unroll
        for (int word = 0; word < 4 && i + word < kWidth; ++word) {
          values[i + word] = dropped_or_scaled(values[i + word], bits.words[word], scale, job);
        }
      }
    } else {
      detail::PhiloxBits bits{};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int64_t word = (position + i) & 3;
        if (i == 0 || word == 0) {
          bits = detail::philox(static_cast<uint64_t>((position + i) >> 2), job.seed);
        }
        const uint32_t random = word == 0   ? bits.words[0]
                                : word == 1 ? bits.words[1]
                                : word == 2 ? bits.words[2]
                                            : bits.words[3];
        values[i] = dropped_or_scaled(values[i], random, scale, job);
      }
    }
    store_pack<Storage>(job.y, begin, values);
  }

 private:
  static __device__ __forceinline__ Scalar dropped_or_scaled(Scalar value,
                                                             uint32_t random,
                                                             Scalar scale,
                                                             const DropoutJob& job) {
    return random < job.threshold ? Scalar(0) : value * scale;
  }
};

// The seed is an argument of the kernel, so each replay of a CUDA graph would drop the same
// elements.
void check_not_capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  TORCH_CHECK(status == cudaStreamCaptureStatusNone,
              "dropout got a call during the capture of a CUDA graph, each replay of which would "
              "drop the same elements; capture layers without dropout only.");
}

}  // namespace

void launch_dropout(const DropoutJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  check_not_capturing(c10::cuda::getCurrentCUDAStream(device.index()));
  visit_storage(job.type, [&]<typename Storage>() {
    constexpr int kWidth = kVectorBytes / sizeof(Storage);
    // No pack crosses the end of a run, and thus of the array.
    const bool is_packable = is_vector_aligned({job.x, job.y}) && job.run_size % kWidth == 0;
    launch_elementwise<DropoutOperation<Storage>>(job, is_packable, device);
  });
}

}  // namespace weft::kernels::cuda
