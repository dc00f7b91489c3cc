#include "dropout_launch.h"
#include "elementwise.cuh"
#include "philox.h"
#include "vector_access.cuh"

#include <c10/cuda/CUDAGuard.h>

#include <cstdint>

namespace weft::kernels::cuda {
namespace {

using detail::DropoutJob;

// The `Operation` of elementwise.cuh.
template <typename Element>
struct DropoutOperation {
  using Storage = Element;

  // Processes elements [begin, begin + kWidth), which lie in one run. A pack of 4 or 8 elements
  // whose position is a multiple of 4 needs one Philox counter for every 4 elements.
  template <int kWidth>
  static __device__ __forceinline__ void run(const DropoutJob& job, int64_t begin) {
    using Scalar = ScalarOf<Storage>;
    const int64_t run_idx = begin / job.run_size;
    const int64_t position = run_idx * job.full_run_size + job.run_begin + begin % job.run_size;
    const Scalar scale = static_cast<Scalar>(job.scale);
    Scalar values[kWidth];
    load_pack<Storage>(job.x, begin, values);
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
      values[i] = random < job.threshold ? Scalar(0) : values[i] * scale;
    }
    store_pack<Storage>(job.y, begin, values);
  }
};

}  // namespace

void launch_dropout(const DropoutJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  visit_storage(job.type, [&]<typename Storage>() {
    constexpr int kWidth = kVectorBytes / sizeof(Storage);
    // No pack crosses the end of a run, and thus of the array.
    const bool is_packable = is_vector_aligned({job.x, job.y}) && job.run_size % kWidth == 0;
    launch_elementwise<DropoutOperation<Storage>>(job, is_packable, device);
  });
}

}  // namespace weft::kernels::cuda
