// The memory of a rank's communication: FSDP2's gathers and reductions, averages over replicas, and
// staging buffers.

#include "rank_memory.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace weft::strategy::detail {

namespace {

// The most bytes of each of a rank's two staging buffers in the shared-memory backend.
constexpr int64_t kMaxStagingBytes = int64_t{1} << 20;
constexpr int64_t kPageBytes = 4096;
// Stepped parameters of fewer bytes are gathered together
// (weft.strategy.data_parallel.ShardedStates).
constexpr int64_t kGatherBytes = int64_t{25} << 20;

int64_t to_pages(int64_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

void RankMemory::hold_accumulated_gradients() {
  if (dp_size_ == 1) {
    hold_gradients_of_previous_step();
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameter_buffers_[i].unsharded_gradient =
        hold_bytes(MemoryCategory::kScratch, num_elements(shapes_[i]) * 4);
  }
}

void RankMemory::hold_gradients_of_previous_step() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameter_buffers_[i].gradient = hold_bytes(MemoryCategory::kGradients, local_bytes(i));
  }
}

void RankMemory::hold_staging_of_previous_step() {
  if (num_replicas_ > 1) {
    int64_t most = buckets_ ? buckets_->largest_bytes() : 0;
    for (std::size_t i = 0; i < parameters_.size() && !buckets_; ++i) {
      most = std::max(most, local_bytes(i));
    }
    const int64_t staging_bytes = to_pages(std::min(most, kMaxStagingBytes));
    hold_staging(replica_staging_, staging_bytes, staging_bytes);
    if (num_state_shards_ > 1 && num_state_shards_ < num_replicas_) {  // another group
      hold_staging(data_staging_, staging_bytes, staging_bytes);
    }
  }
  if (dp_size_ == 1) {
    return;
  }
  int64_t most = 0;
  for (std::size_t unit = 0; unit < unsharded_units_.size(); ++unit) {
    most = std::max(most, unit_elements(static_cast<int64_t>(unit)) * 4);
  }
  communicate_data(reduced_staging_bytes(most), false);
  if (axis_size(spec_.mesh, "data_replicate") > 1) {
    const int64_t staging_bytes = to_pages(std::min(most / dp_size_, kMaxStagingBytes));
    hold_staging(replica_staging_, staging_bytes, staging_bytes);
  }
}

// A rank stages the segments of the other ranks, each rounded up to cache lines of 64 bytes.
int64_t RankMemory::reduced_staging_bytes(int64_t num_bytes) const {
  return (std::min(num_bytes, kMaxStagingBytes) / dp_size_ + 63) / 64 * 64 * (dp_size_ - 1);
}

// The parameters are copied out of the buffer into which they are gathered.
void RankMemory::unshard(int64_t unit) {
  if (dp_size_ == 1 || unsharded_units_.at(static_cast<std::size_t>(unit))) {
    return;
  }
  const int64_t num_bytes = unit_bytes(unit);
  const bool is_cast = gathers_in_half() && !has_split_weights_;
  Buffer input = is_cast ? hold_bytes(MemoryCategory::kScratch, num_bytes / dp_size_) : Buffer();
  Buffer gathered = hold_bytes(MemoryCategory::kScratch, num_bytes);
  communicate_data(num_bytes / dp_size_, true);
  input.reset();
  gathered_.reset();
  unsharded_units_.at(static_cast<std::size_t>(unit)) =
      hold_bytes(MemoryCategory::kScratch, num_bytes);
  if (is_forward_) {
    gathered_ = std::move(gathered);
  }
}

void RankMemory::unshard(const std::vector<int64_t>& units) {
  if (dp_size_ == 1) {
    return;
  }
  std::deque<Buffer> gathered;
  for (const int64_t unit : units) {
    gathered.push_back(hold_bytes(MemoryCategory::kScratch, unit_bytes(unit)));
    communicate_data(unit_bytes(unit) / dp_size_, true);
  }
  for (const int64_t unit : units) {
    unsharded_units_.at(static_cast<std::size_t>(unit)) =
        hold_bytes(MemoryCategory::kScratch, unit_bytes(unit));
    gathered.pop_front();
  }
}

void RankMemory::reshard(int64_t unit) {
  unsharded_units_.at(static_cast<std::size_t>(unit)).reset();
}

void RankMemory::forward_ends() {
  gathered_.reset();
  is_forward_ = false;
}

void RankMemory::backward_ends() {
  if (buckets_) {
    buckets_->finish();
  }
  reduced_.reset();
  averaged_.clear();
  copied_.clear();  // the optimizer's step() waits for the copies
}

// Gradients are reduced in float32 in every precision.
void RankMemory::reduce_gradients(int64_t unit) {
  if (dp_size_ == 1) {
    return;
  }
  reshard(unit);
  reduced_.reset();
  const int64_t num_bytes = unit_elements(unit) * 4;
  reduced_ = hold_bytes(MemoryCategory::kScratch, num_bytes);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (unit_of(i) == unit) {
      parameter_buffers_[i].unsharded_gradient.reset();
    }
  }
  communicate_data(reduced_staging_bytes(num_bytes), false);
  // The gradients of a unit are views of one tensor in float32, or copies of them in half
  // precision.
  const bool is_copied = initial_bytes_ == 2 || has_split_weights_;
  Buffer output = is_copied ? hold_bytes(MemoryCategory::kScratch, num_bytes / dp_size_) : Buffer();
  std::vector<Buffer> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (unit_of(i) == unit) {
      gradients.push_back(hold_bytes(MemoryCategory::kGradients, local_bytes(i)));
      if (!spec_.steps_in_backward || has_copy_elsewhere(i)) {
        parameter_buffers_[i].gradient = gradients.back();
      }
    }
  }
  if (spec_.steps_in_backward) {
    const auto of_unit = std::make_shared<const std::vector<Buffer>>(gradients);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (unit_of(i) == unit && !has_copy_elsewhere(i)) {
        step_in_backward(i, is_copied ? parameter_buffers_[i].gradient : Buffer(of_unit));
      }
    }
  }
  if (axis_size(spec_.mesh, "data_replicate") > 1) {  // until the end of the backward
    if (is_copied) {
      averaged_.push_back(std::move(output));
    } else {
      std::move(gradients.begin(), gradients.end(), std::back_inserter(averaged_));
    }
  }
}

void RankMemory::gather_stepped() {
  int64_t shard_bytes = 0;  // of the parameters that are gathered together
  int64_t full_bytes = 0;
  const auto gather = [&] {
    const Buffer sent = hold_bytes(MemoryCategory::kScratch, shard_bytes);
    hold_bytes(MemoryCategory::kScratch, shard_bytes * num_state_shards_);
    shard_bytes = full_bytes = 0;
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t num_bytes = local_bytes(i);
    const int64_t own_bytes = stepped_elements(i) * element_bytes(i);
    if (num_bytes >= kGatherBytes && local_elements(i) % num_state_shards_ == 0) {
      hold_bytes(MemoryCategory::kScratch, own_bytes);  // gathered in place
      continue;
    }
    if (full_bytes > 0 && full_bytes + num_bytes > kGatherBytes) {
      gather();
    }
    shard_bytes += own_bytes;
    full_bytes += num_bytes;
  }
  gather();
}

void RankMemory::communicate(int64_t num_bytes) {
  if (tp_size_ == 1) {
    return;
  }
  const int64_t staging_bytes = to_pages(std::min(num_bytes, kMaxStagingBytes));
  hold_staging(staging_, staging_bytes, staging_bytes);
}

// An all-gather stages the shard, in one half of a buffer and then in the other; a reduce-scatter
// stages the segments of the other ranks in slots of each half.
void RankMemory::communicate_shards(int64_t shard_bytes) {
  if (tp_size_ == 1) {
    return;
  }
  constexpr int64_t kHalfBytes = kMaxStagingBytes / 2;
  const int64_t slot_bytes = kHalfBytes / tp_size_ / 64 * 64;
  int64_t staging_bytes = 0;
  for (const int64_t half : {0, 1}) {
    const auto rest_after = [&](int64_t first_bytes) {
      return std::max<int64_t>(shard_bytes - half * first_bytes, 0);
    };
    const int64_t gathered = std::min(rest_after(kHalfBytes), kHalfBytes);
    const int64_t reduced = std::min(rest_after(slot_bytes), slot_bytes) * (tp_size_ - 1);
    staging_bytes += to_pages(std::max(gathered, reduced));
  }
  hold_staging(staging_, staging_bytes, staging_bytes);
}

// A model with a single unit gathers once and reduces once in a step, so that each message always
// uses the same buffer.
void RankMemory::communicate_data(int64_t num_bytes, bool is_gather) {
  const int64_t staging_bytes = to_pages(std::min(num_bytes, kMaxStagingBytes));
  const bool is_alone = unsharded_units_.size() == 1;
  hold_staging(data_staging_,
               is_alone && !is_gather ? 0 : staging_bytes,
               is_alone && is_gather ? 0 : staging_bytes);
}

void RankMemory::communicate_once(int64_t num_bytes) {
  hold_staging(staging_, to_pages(std::min(num_bytes, kMaxStagingBytes)), 0);
}

void RankMemory::sum_tied_gradients() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!has_copy_elsewhere(i)) {
      continue;
    }
    {
      const Buffer received = hold_bytes(MemoryCategory::kScratch, local_bytes(i));
      const Buffer sent = hold_bytes(MemoryCategory::kScratch, local_bytes(i));
      const Buffer sum = hold_bytes(MemoryCategory::kScratch, local_bytes(i));
    }
    if (spec_.steps_in_backward) {
      step_in_backward(i, parameter_buffers_[i].gradient);
    }
  }
}

// The sizes of ops/collectives/core/shared_state.cpp.
void RankMemory::hold_rings(int64_t num_peers, int64_t num_bytes) {
  constexpr int64_t kHeaderBytes = 128;
  constexpr int64_t kMaxRingBytes = int64_t{256} << 10;
  constexpr int64_t kRingsBytes = int64_t{4} << 20;  // of a group, for all pairs of ranks
  const int64_t num_ranks = axis_size(spec_.mesh, "pipeline_parallel");
  const int64_t share = kRingsBytes / (num_ranks * (num_ranks - 1)) / kHeaderBytes * kHeaderBytes;
  const int64_t ring_bytes = std::min(std::clamp(share, kPageBytes, kMaxRingBytes), num_bytes);
  for (int64_t i = 0; i < num_peers; ++i) {
    rings_.push_back(
        hold_bytes(MemoryCategory::kCommunication, to_pages(kHeaderBytes + ring_bytes)));
  }
}

void RankMemory::hold_staging(Staging& staging, int64_t first_bytes, int64_t second_bytes) {
  const int64_t min_bytes = (spec_.mesh.size() == 1 ? 1 : 3) * kPageBytes;
  const int64_t max_bytes = spec_.mesh.size() == 1 ? min_bytes : kMaxStagingBytes;
  const std::array<int64_t, 2> wanted = {
      std::clamp(first_bytes, std::max(min_bytes, staging.num_bytes[0]), max_bytes),
      std::clamp(second_bytes, std::max(min_bytes, staging.num_bytes[1]), max_bytes)};
  if (wanted != staging.num_bytes) {
    staging.buffer.reset();
    staging.num_bytes = wanted;
    staging.buffer = hold_bytes(MemoryCategory::kCommunication, wanted[0] + wanted[1]);
  }
}

}  // namespace weft::strategy::detail
