#pragma once

#include "../memory/parameters.h"
#include "weft/strategy/tuning/cluster.h"

#include <vector>

namespace weft::strategy::detail {

// The work of some layers for one micro-batch.
struct Work {
  double forward = 0;  // seconds of the forward's kernels
  double backward = 0;
  double recomputed = 0;    // seconds of the kernels that a checkpoint runs again
  double forward_sums = 0;  // seconds of tensor-parallel collectives
  double backward_sums = 0;
  double recomputed_sums = 0;
  double flops = 0;       // of the forward
  double sent_bytes = 0;  // over the tensor-parallel group
  double elements = 0;    // of the rank's tensor-parallel shards

  Work& operator+=(const Work& other) {
    forward += other.forward;
    backward += other.backward;
    recomputed += other.recomputed;
    forward_sums += other.forward_sums;
    backward_sums += other.backward_sums;
    recomputed_sums += other.recomputed_sums;
    flops += other.flops;
    sent_bytes += other.sent_bytes;
    elements += other.elements;
    return *this;
  }
  [[nodiscard]] double forward_seconds() const { return forward + forward_sums; }
  [[nodiscard]] double backward_seconds() const {
    return backward + recomputed + backward_sums + recomputed_sums;
  }
};

// Returns the work of a micro-batch of `spec.sequences` on the rank with the largest shards: of the
// embedding, of each block, and of the final norm with the output layer and the loss; or of one
// MLP.
//
// Each matrix product takes the longer of two times: that of its operations, and that of reading
// its operands and writing its result. Norms, rotary positions, activations and residual additions
// take the time of their bytes, as separate kernels. A backward has two products for each of the
// forward.
//
// With measured layer times, the seconds of kernels are those (measured_layers.h). Throws
// std::invalid_argument for times of another training.
std::vector<Work> layers_of(const TrainingSpec& spec, const Cluster& cluster);

// Returns the units of FSDP2 without a pipeline: the root unit, with all that is in no block, and
// the blocks.
std::vector<Work> units_of(std::vector<Work> layers);

// Returns the work of a stage's layers.
Work work_of(const StageLayers& stage, const DecoderModel& model, const std::vector<Work>& layers);

}  // namespace weft::strategy::detail
