#pragma once

// Finds the layouts with the shortest predicted steps that fit into the memory of a device.

#include "weft/strategy/memory_model.h"
#include "weft/strategy/tuning/cluster.h"
#include "weft/strategy/tuning/step_time.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft::strategy {

struct LayoutSearch {
  // The model, the plan, the tokens of a sequence, and the options that a search does not change:
  // precision, optimizer, formats. Its mesh, sequences, micro_batches, checkpointing and
  // steps_in_backward are ignored.
  TrainingSpec training;
  Cluster cluster;
  int64_t num_devices = 1;
  int64_t global_sequences = 1;  // of a step, over all ranks and micro-batches
  int64_t memory_limit = 0;      // the most bytes of a device
  // Sizes that the user has fixed.
  std::optional<int64_t> replicas = {};
  std::optional<int64_t> data = {};
  std::optional<int64_t> tensor = {};
  std::optional<int64_t> micro_batches = {};
  // The values that the search tries. Stepping in the backward takes no less time, so it is chosen
  // only where a layout does not fit without it. Adagrad never does.
  std::vector<Checkpointing> checkpointing = {
      Checkpointing::kNone, Checkpointing::kSelective, Checkpointing::kFull};
  std::vector<bool> steps_in_backward = {false, true};
  int64_t max_results = 5;
};

struct FoundLayout {
  TrainingSpec training;
  StepTime time;
  MemoryUsage at_peak;  // of the rank with the most bytes
};

// Why the model cannot be sharded over a number of tensor-parallel ranks.
struct Rejection {
  int64_t tensor = 1;
  std::string reason;
};

struct LayoutSearchResult {
  std::vector<FoundLayout> layouts;  // that fit, the fastest first
  int64_t num_candidates = 0;        // valid ones; variants of steps_in_backward count as one
  // Those that need more memory, among the faster ones than the last of `layouts`; among all if
  // there are fewer than max_results.
  int64_t num_above_limit = 0;
  std::optional<FoundLayout> smallest;  // the one with the least bytes, if no layout fits
  std::vector<Rejection> rejections;
};

// Tries each number of replicas, data-parallel and tensor-parallel ranks with each micro-batch and
// kind of checkpointing.
//
// The times of all candidates are predicted first, which is cheap; then memory is predicted in the
// order of the times, until max_results candidates fit. So the result is that of a search of all
// candidates. If none fits, the memory of all of them is predicted, except of those whose
// parameters and optimizer states alone take more than the least bytes of the earlier ones.
//
// Throws std::invalid_argument for numbers below 1, and if no candidate is valid: with the sizes
// that are fixed, for the number of devices or of sequences, or for the model.
LayoutSearchResult search_layouts(const LayoutSearch& search);

}  // namespace weft::strategy
