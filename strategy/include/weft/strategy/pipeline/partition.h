#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace weft::strategy {

// The cost of one layer of a model for one micro-batch; embeddings and heads are layers, too.
struct LayerCost {
  double time = 0;               // forward and backward, in any one unit
  int64_t activation_bytes = 0;  // kept from the forward to the backward
  int64_t parameter_bytes = 0;   // parameters, gradients, optimizer states
};

struct PartitionOptions {
  int64_t num_stages = 1;
  // The number of micro-batches whose activations each stage keeps at once: Simulation::in_flight
  // of the schedule. Default: one for each stage.
  std::vector<int64_t> in_flight = {};
  std::optional<int64_t> memory_limit = {};  // the most bytes of a stage
  // Weight of memory against time in a stage's cost, from 0 (time only) to 1 (bytes only). The cost
  // is the weighted sum of the stage's fractions of the total time and of the total bytes.
  double memory_weight = 0;
};

struct Partition {
  std::vector<int64_t> begins;  // the first layer of each stage
  std::vector<double> times;    // of each stage, for one micro-batch
  std::vector<int64_t> bytes;   // of each stage, with its micro-batches in flight
};

// Divides a chain of layers into consecutive, non-empty stages. Returns the division that minimizes
// the largest cost of a stage and, among equal ones, the sum of squared costs.
//
// Dynamic programming, num_stages * layers^2 steps.
//
// Throws std::invalid_argument for fewer layers than stages, for numbers out of range and, naming
// the smallest limit that would suffice, if no division stays within the memory limit.
Partition partition(std::span<const LayerCost> layers, const PartitionOptions& options);

}  // namespace weft::strategy
