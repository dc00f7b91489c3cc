#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace weft::strategy {

// What one layer of a trunk takes for one micro-batch; embeddings and heads are layers, too.
struct LayerCost {
  double time = 0;               // forward and backward, in any one unit
  int64_t activation_bytes = 0;  // kept between them
  int64_t parameter_bytes = 0;   // parameters, gradients, optimizer states
};

struct PartitionOptions {
  int64_t num_stages = 1;
  // Micro-batches whose activations each stage keeps at once: Simulation::in_flight of the schedule
  // to be used. Default: one each.
  std::vector<int64_t> in_flight = {};
  std::optional<int64_t> memory_limit = {};  // bytes of a stage
  // What is made small: 0, the time of the slowest stage; 1, the bytes of the largest; between
  // them, the largest sum of a stage's shares in the time and the bytes of all, so weighted.
  double memory_weight = 0;
};

struct Partition {
  std::vector<int64_t> begins;  // of each stage, its first layer
  std::vector<double> times;    // of each stage, for one micro-batch
  std::vector<int64_t> bytes;   // of each stage, with its micro-batches in flight
};

// Cuts a chain of layers into stages that follow each other, none of them empty. Among the
// cuts with the least worst stage, takes the one with the least sum of squares over stages.
//
// Dynamic programming, num_stages * layers^2 steps.
//
// Throws std::invalid_argument for fewer layers than stages, for numbers out of range and where no
// cut keeps the limit, with the least limit that would do.
Partition partition(std::span<const LayerCost> layers, const PartitionOptions& options);

}  // namespace weft::strategy
