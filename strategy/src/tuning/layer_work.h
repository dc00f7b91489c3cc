#pragma once

#include "../memory/parameters.h"
#include "weft/strategy/tuning/cluster.h"

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
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

// The work of a model for a micro-batch of `spec.sequences`, on the rank with the largest shards.
struct ModelWork {
  // The work of the embedding, of each block, and of the final norm with the output layer and the
  // loss; or of one MLP.
  std::vector<Work> layers;
  // The communication at the ends of each stage, or of the model without a pipeline: with sequence
  // parallelism, the last block gathers its output, and the first one the gradient of its input.
  Work ends;
};

// Returns the work of a model.
//
// Each matrix product takes the longer of two times: that of its operations, and that of reading
// its operands and writing its result. Norms, rotary positions, activations and residual additions
// take the time of their bytes, as separate kernels. A backward has two products for each of the
// forward.
//
// With sequence parallelism, norms and residual additions have a shard of the tokens. In place of
// the all-reduces, the forward all-gathers the input of attention and MLP and reduce-scatters the
// output, the backward does the same for the gradients, and a fused MLP gathers its input again.
// With several sequences, each of these collectives copies the tokens.
//
// With measured layer times, the seconds of kernels are those (measured_layers.h). Throws
// std::invalid_argument for times of another training.
ModelWork model_work(const TrainingSpec& spec, const Cluster& cluster);

// Keeps the results of model_work() for trainings that differ only in their mesh, batch,
// micro-batches, stages, ZeRO stage, checkpoints, sequence parallelism, steps and offload. Not
// thread-safe.
class WorkCache {
 public:
  explicit WorkCache(Cluster cluster) : cluster_(std::move(cluster)) {}

  // The result is valid as long as the cache.
  const ModelWork& work_of(const TrainingSpec& spec);
  [[nodiscard]] const Cluster& cluster() const { return cluster_; }

 private:
  // Ranks, tensor-parallel ranks, sequences, whether FSDP2 shards parameters, sequence parallelism,
  // kind and number of checkpoints; and the first blocks of stages if the number is limited.
  using Key = std::tuple<int64_t,
                         int64_t,
                         int64_t,
                         bool,
                         bool,
                         Checkpointing,
                         std::optional<int64_t>,
                         int64_t,
                         std::vector<int64_t>>;

  Cluster cluster_;
  std::map<Key, ModelWork> known_;
};

// Returns the units of FSDP2 without a pipeline: the root unit, with all that is in no block, and
// the blocks.
std::vector<Work> units_of(const ModelWork& model);

// Returns the work of a stage's layers.
Work work_of(const StageLayers& stage, const DecoderModel& model, const ModelWork& of_model);

}  // namespace weft::strategy::detail
