#pragma once

// Predicts the time of a training step from the rates of a cluster: a roofline of each operator
// (Williams et al. 2009), ring collectives, and FSDP2's overlap.

#include "weft/strategy/memory_model.h"
#include "weft/strategy/tuning/cluster.h"

#include <cstdint>
#include <vector>

namespace weft::strategy {

// Seconds of a step of one rank, for all its micro-batches; and what the rank sends.
struct StepTime {
  double compute = 0;          // forward and backward
  double recomputation = 0;    // the forwards that checkpoints run again, with their communication
  double tensor_parallel = 0;  // collectives of tensor-parallel ranks, which nothing overlaps
  double data_parallel = 0;    // collectives of data-parallel ranks and replicas, as far as the
                               // device waits for them
  double optimizer = 0;
  double pipeline = 0;  // for which the rank waits for other stages, and for messages
  // The operations of a rank's share of the model, in a pipeline on average: 6 per parameter and
  // token, and attention; without recomputation.
  double model_flops = 0;
  double sent_bytes = 0;

  [[nodiscard]] double total() const {
    return compute + recomputation + tensor_parallel + data_parallel + optimizer + pipeline;
  }
};

// Returns the time of a step of the rank with the largest shards.
//
// Each matrix product takes the longer of two times: that of its operations, and that of reading
// its operands and writing its result. Norms, rotary positions, activations and residual additions
// take the time of their bytes, as separate kernels. A backward has two products for each of the
// forward. With overlap, a unit of FSDP2 is gathered while the unit before it computes, and its
// gradients are reduced while the next computes; replicas average gradients then, too. Gradients
// are reduced in the last micro-batch only, as the Trainer does.
//
// With offloads_states, the step takes the longest of the copies to the host, of those back, and of
// all bytes in CPU memory, whose rate the devices of a host share. With steps_in_backward, it
// begins in the last backward, in the order of the gradients, and delays nothing but the end of the
// step; in a pipeline, only if no data-parallel ranks reduce gradients after the schedule.
//
// In a pipeline, the rank is the one that ends last, and the schedule is simulated with the times
// of its stages (pipeline/simulate.h). Layers gather their parameters before the schedule, and
// reduce gradients after it. The pipeline axis is the outermost.
//
// Throws std::invalid_argument for an invalid spec, like predict_memory, and for offloads_states on
// a cluster without CPU memory.
StepTime predict_step_time(const TrainingSpec& spec, const Cluster& cluster);

// Returns the same without a simulation, so that `pipeline` has no waits: at most the predicted
// time.
StepTime least_step_time(const TrainingSpec& spec, const Cluster& cluster);

// Returns the first blocks of `num_stages` stages, except the first stage, that minimize the time
// of the slowest. `spec` is without a pipeline; its sequences are those of a micro-batch. Throws
// std::invalid_argument for fewer blocks than stages.
std::vector<int64_t> even_stages(const TrainingSpec& spec,
                                 const Cluster& cluster,
                                 int64_t num_stages);

}  // namespace weft::strategy
