#include "code_blocks.cuh"
#include "float_formats.cuh"
#include "optimizer_math.h"
#include "optimizer_step_launch.h"

#include <c10/cuda/CUDAException.h>

#include <cstdint>
#include <type_traits>

namespace weft::kernels::cuda {
namespace {

using detail::AdamStepJob;
using detail::FloatCodesJob;
using detail::FloatCodesOp;
using detail::MomentumStepJob;
using detail::StateFormat;

// A lane's elements of a state in float32: `kIsSecond` as in low_precision.h.
template <StateFormat kFormat, bool kIsSecond>
struct LaneState {
  template <int kWidth>
  __device__ __forceinline__ void load(const detail::StateArray& state,
                                       float code_step,
                                       int64_t begin,
                                       float (&out)[kWidth]) const {
    if constexpr (kFormat == StateFormat::kFloat32) {
      load_elements<float>(state.values, begin, out);
    } else if constexpr (kFormat == StateFormat::kBFloat16) {
      load_bfloat16(state.values, begin, out);
    } else {
      load_codes<!kIsSecond>(state.values, code_step, begin, out);
    }
  }

  // Keeps new elements; of second moments with codes, `root` is kept.
  template <int kWidth>
  __device__ __forceinline__ void keep(int i,
                                       const float (&x)[kWidth],
                                       const float (&root)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if constexpr (kFormat == StateFormat::kCodes) {
        const int32_t magnitude = detail::magnitude(x[j]);
        largest = magnitude > largest ? magnitude : largest;
      }
      elements[i + j] = kFormat == StateFormat::kCodes && kIsSecond ? root[j] : x[j];
    }
  }

  // Reduces the scale over the warp, stores it, and computes the factor of the codes. All lanes
  // call.
  __device__ __forceinline__ void finish_block(const detail::StateArray& state, int64_t idx) {
    if constexpr (kFormat == StateFormat::kCodes) {
      const float scale = detail::scale_of(warp_max(largest));
      code_factor = detail::code_factor(scale, detail::kLargestCode<kIsSecond>);
      is_finite = scale == scale;
      if (threadIdx.x % kWarpSize == 0) state.scales[idx] = scale;
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void store(const detail::StateArray& state,
                                        int i,
                                        int64_t begin,
                                        const uint32_t (&random)[kWidth]) const {
    float x[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = elements[i + j];
    if constexpr (kFormat == StateFormat::kFloat32) {
      store_elements<float>(state.values, begin, x);
    } else if constexpr (kFormat == StateFormat::kBFloat16) {
      uint16_t bits[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        bits[j] = detail::to_bfloat16_stochastic(x[j], detail::random_units<kIsSecond>(random[j]));
      }
      store_elements<uint16_t>(state.values, begin, bits);
    } else {
      float u[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (!is_finite) x[j] = 0;
        u[j] = static_cast<float>(detail::random_units<kIsSecond>(random[j])) * 0x1p-16F;
      }
      store_codes<!kIsSecond>(state.values, code_factor, begin, x, u);
    }
  }

  float elements[kLaneElements];
  int32_t largest = 0;
  float code_factor = 0;
  bool is_finite = true;
};

template <int kWidth>
__device__ __forceinline__ void load_grads(const detail::OptimizerStepJob& job,
                                           int64_t begin,
                                           float (&out)[kWidth]) {
  if (job.has_bfloat16_grad) {
    load_bfloat16(job.grad, begin, out);
  } else {
    load_elements<float>(job.grad, begin, out);
  }
}

// One step of one element, with weight decay of the gradient if there is any.
__device__ __forceinline__ float step_element(const detail::AdamConstants& constants,
                                              float parameter,
                                              float grad,
                                              float& first,
                                              float& second,
                                              float& root) {
  return constants.grad_decay != 0
             ? detail::adam_element<true>(constants, parameter, grad, first, second, root)
             : detail::adam_element<false>(constants, parameter, grad, first, second, root);
}
__device__ __forceinline__ float step_element(const detail::MomentumConstants& constants,
                                              float parameter,
                                              float grad,
                                              float& first,
                                              float& /*second*/,
                                              float& /*root*/) {
  return constants.grad_decay != 0
             ? detail::momentum_element<true>(constants, parameter, grad, first)
             : detail::momentum_element<false>(constants, parameter, grad, first);
}

// The random numbers of a block's elements. The lower half of the position may pass 2^32 within the
// block, where the key changes.
class BlockRandom {
 public:
  __device__ __forceinline__ BlockRandom(const detail::OptimizerStepJob& job,
                                         const CodeBlock& block) {
    const auto row = static_cast<uint64_t>(job.row + block.row);
    const uint64_t position = row * static_cast<uint64_t>(job.full_columns) +
                              static_cast<uint64_t>(job.column + block.column);
    lower_ = static_cast<uint32_t>(position);
    const auto upper = static_cast<uint32_t>(position >> 32);
    key_ = detail::random_key(job.seed, job.step, upper);
    const bool is_crossing = lower_ + static_cast<uint32_t>(block.size) < lower_;
    next_key_ = is_crossing ? detail::random_key(job.seed, job.step, upper + 1) : key_;
  }

  __device__ __forceinline__ uint32_t at(int offset) const {
    const uint32_t word = lower_ + static_cast<uint32_t>(offset);
    return detail::mix(word, word < lower_ ? next_key_ : key_);
  }

 private:
  uint32_t lower_;
  detail::RandomKey key_;
  detail::RandomKey next_key_;
};

template <typename Job, StateFormat kStates, int kWidth>
__global__ void __launch_bounds__(kCodeThreads) optimizer_step_kernel(const Job job) {
  constexpr bool kHasSecond = std::is_same_v<Job, AdamStepJob>;
  constexpr bool kHasCodes = kStates == StateFormat::kCodes;
  for_each_code_block(job, [&](const CodeBlock& block) {
    LaneState<kStates, false> first;
    LaneState<kStates, true> second;
    float first_step = 0;
    float second_step = 0;
    if constexpr (kHasCodes) {
      first_step = detail::code_step(job.first.scales[block.idx], detail::kLargestCode<false>);
      if constexpr (kHasSecond) {
        second_step = detail::code_step(job.second.scales[block.idx], detail::kLargestCode<true>);
      }
    }
    for_each_lane_pack<kWidth>(block, [&](int i, int offset) {
      const int64_t begin = block.begin + offset;
      float parameters[kWidth];
      float grads[kWidth];
      float m[kWidth];
      float v[kWidth] = {};
      float roots[kWidth] = {};
      load_weights(job, begin, parameters);
      load_grads(job, begin, grads);
      first.load(job.first, first_step, begin, m);
      if constexpr (kHasSecond) second.load(job.second, second_step, begin, v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        parameters[j] = step_element(job.constants, parameters[j], grads[j], m[j], v[j], roots[j]);
      }
      store_weights(job, begin, parameters);
      first.keep(i, m, m);
      if constexpr (kHasSecond) second.keep(i, v, roots);
    });
    first.finish_block(job.first, block.idx);
    if constexpr (kHasSecond) second.finish_block(job.second, block.idx);
    const BlockRandom block_random(job, block);
    for_each_lane_pack<kWidth>(block, [&](int i, int offset) {
      uint32_t random[kWidth] = {};
      if constexpr (kStates != StateFormat::kFloat32) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) random[j] = block_random.at(offset + j);
      }
      first.store(job.first, i, block.begin + offset, random);
      if constexpr (kHasSecond) second.store(job.second, i, block.begin + offset, random);
    });
  });
}

// kSplit and kJoin.
template <int kWidth>
__global__ void __launch_bounds__(kCodeThreads) split_float_kernel(const FloatCodesJob job) {
  for_each_code_block(job, [&](const CodeBlock& block) {
    for_each_lane_pack<kWidth>(block, [&](int /*i*/, int offset) {
      const int64_t begin = block.begin + offset;
      float x[kWidth];
      if (job.op == FloatCodesOp::kSplit) {
        load_elements<float>(job.x, begin, x);
        store_split(job.codes, job.low, job.is_narrow, begin, x);
      } else {
        load_split(job.codes, job.low, job.is_narrow, begin, x);
        store_elements<float>(job.x, begin, x);
      }
    });
  });
}

template <bool kIsSigned, int kWidth>
__global__ void __launch_bounds__(kCodeThreads) quantize_blocks_kernel(const FloatCodesJob job) {
  for_each_code_block(job, [&](const CodeBlock& block) {
    LaneState<StateFormat::kCodes, !kIsSigned> state;
    for_each_lane_pack<kWidth>(block, [&](int i, int offset) {
      float x[kWidth];
      float roots[kWidth];
      load_elements<float>(job.x, block.begin + offset, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) roots[j] = x[j] > 0 ? std::sqrt(x[j]) : 0.0F;
      state.keep(i, x, roots);
    });
    const detail::StateArray codes{job.codes, job.scales};
    state.finish_block(codes, block.idx);
    for_each_lane_pack<kWidth>(block, [&](int i, int offset) {
      uint32_t halves[kWidth];  // rounds to nearest
#pragma unroll
      for (int j = 0; j < kWidth; ++j) halves[j] = 0x80008000U;
      state.store(codes, i, block.begin + offset, halves);
    });
  });
}

template <bool kIsSigned, int kWidth>
__global__ void __launch_bounds__(kCodeThreads) dequantize_blocks_kernel(const FloatCodesJob job) {
  for_each_code_block(job, [&](const CodeBlock& block) {
    const float step = detail::code_step(job.scales[block.idx],
                                         kIsSigned ? detail::kSignedCodes : detail::kUnsignedCodes);
    for_each_lane_pack<kWidth>(block, [&](int /*i*/, int offset) {
      float x[kWidth];
      load_codes<kIsSigned>(job.codes, step, block.begin + offset, x);
      store_elements<float>(job.x, block.begin + offset, x);
    });
  });
}

// Calls launch.operator()<kWidth>() with the width of the packs.
template <typename Launch>
void visit_width(bool is_packable, int64_t row_size, const Launch& launch) {
  if (is_packable && row_size % kLaneElements == 0) {
    launch.template operator()<kLaneElements>();
  } else {
    launch.template operator()<1>();
  }
}

template <typename Job>
void launch_step(const Job& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
  TORCH_CHECK(status == cudaStreamCaptureStatusNone,
              "optimizer step got a call during the capture of a CUDA graph, each replay of which "
              "would make the same step; capture the forward and the backward only.");
  const bool is_packable = is_vector_aligned(
      {job.parameter, job.low_bits, job.grad, job.first.values, job.second.values});
  visit_width(is_packable, job.row_size, [&]<int kWidth>() {
    switch (job.state_format) {
      case StateFormat::kFloat32:
        return launch_code_blocks(
            optimizer_step_kernel<Job, StateFormat::kFloat32, kWidth>, job, device);
      case StateFormat::kBFloat16:
        return launch_code_blocks(
            optimizer_step_kernel<Job, StateFormat::kBFloat16, kWidth>, job, device);
      case StateFormat::kCodes:
        return launch_code_blocks(
            optimizer_step_kernel<Job, StateFormat::kCodes, kWidth>, job, device);
    }
  });
}

}  // namespace

void launch_adam_step(const AdamStepJob& job, c10::Device device) { launch_step(job, device); }

void launch_momentum_step(const MomentumStepJob& job, c10::Device device) {
  launch_step(job, device);
}

void launch_float_codes(const FloatCodesJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const bool is_packable = is_vector_aligned({job.x, job.codes, job.low});
  visit_width(is_packable, job.row_size, [&]<int kWidth>() {
    switch (job.op) {
      case FloatCodesOp::kSplit:
      case FloatCodesOp::kJoin:
        return launch_code_blocks(split_float_kernel<kWidth>, job, device);
      case FloatCodesOp::kQuantize:
        return job.is_signed
                   ? launch_code_blocks(quantize_blocks_kernel<true, kWidth>, job, device)
                   : launch_code_blocks(quantize_blocks_kernel<false, kWidth>, job, device);
      case FloatCodesOp::kDequantize:
        return job.is_signed
                   ? launch_code_blocks(dequantize_blocks_kernel<true, kWidth>, job, device)
                   : launch_code_blocks(dequantize_blocks_kernel<false, kWidth>, job, device);
    }
  });
}

}  // namespace weft::kernels::cuda
