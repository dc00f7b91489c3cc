// The memory of steps on the CPU, whose optimizer states are in CPU memory.

#include "rank_memory.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace weft::strategy::detail {

namespace {

// Pairs of pinned buffers, for a weight and its gradient (weft.strategy.optimizers.host_steps).
constexpr std::size_t kNumPairs = 2;

}  // namespace

int64_t RankMemory::offloaded_bytes() const {
  int64_t num_bytes = 0;
  int64_t largest = 0;
  for (std::size_t i = 0; i < parameters_.size() && spec_.offloads_states; ++i) {
    num_bytes += state_bytes(i) + low_bits_bytes(i);
    largest = std::max(largest, local_bytes(i));
  }
  const auto buffer_bytes =
      largest == 0 ? 0 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(largest)));
  return num_bytes + 2 * static_cast<int64_t>(kNumPairs) * buffer_bytes;
}

// A step on the CPU begins with a copy of the gradient, whose memory is in use until the copy ends.
// The step after the next one waits for it, with the gradient of a further parameter in memory.
void RankMemory::step_in_backward(std::size_t idx, Buffer gradients) {
  step_temporaries(local_bytes(idx));
  if (spec_.offloads_states) {
    if (copied_.size() == kNumPairs) {
      copied_.pop_front();
    }
    copied_.push_back(std::move(gradients));
  }
  parameter_buffers_[idx].gradient.reset();
}

}  // namespace weft::strategy::detail
