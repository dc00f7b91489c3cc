#pragma once

// Finds the layouts with the shortest predicted steps that fit into the memory of a device.

#include "weft/strategy/memory_model.h"
#include "weft/strategy/tuning/cluster.h"
#include "weft/strategy/tuning/step_time.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace weft::strategy {

struct LayoutSearch {
  // The model, the plan, the tokens of a sequence, and the options that a search does not change:
  // precision, optimizer, formats, checkpointed_blocks. Its mesh, sequences, micro_batches,
  // zero_stage, pipeline, sequence_parallel, checkpointing, steps_in_backward and offloads_states
  // are ignored.
  TrainingSpec training;
  Cluster cluster;
  int64_t num_devices = 1;
  int64_t global_sequences = 1;  // of a step, over all ranks and micro-batches
  int64_t memory_limit = 0;      // the most bytes of a device
  // Sizes that the user has fixed. micro_batches are batches whose gradients are accumulated;
  // pipelines have one batch, which they split.
  std::optional<int64_t> pipeline = {};
  std::optional<int64_t> replicas = {};
  std::optional<int64_t> data = {};
  std::optional<int64_t> tensor = {};
  std::optional<int64_t> micro_batches = {};
  // The values that the search tries. zero_stages are tried with data-parallel ranks; in a
  // pipeline, 2 is left out if 3 is among them, because both gather parameters for a stage. The
  // schedules are kinds with the stages of a rank. Stepping in the backward takes no less time, so
  // it is chosen only where a layout does not fit without it. Adagrad never does.
  std::vector<int64_t> zero_stages = {3, 2, 1};
  std::vector<std::pair<ScheduleKind, int64_t>> schedules = {
      {ScheduleKind::kOneForwardOneBackward, 1}, {ScheduleKind::kInterleaved, 2}};
  std::vector<Checkpointing> checkpointing = {
      Checkpointing::kNone, Checkpointing::kSelective, Checkpointing::kFull};
  // Whether full checkpoints of only the first blocks of each rank are tried, as few as fit: if
  // both kNone and kFull are, and the training has no checkpointed_blocks.
  bool divides_blocks = true;
  std::vector<bool> steps_in_backward = {false, true};
  // Offload is chosen only where a layout does not fit without it, with the faster value of
  // steps_in_backward that fits; and only where the states of a host's devices fit into its
  // host_bytes, as if each device had those of the one with the most. Where both values are,
  // offload is left out if the training or the cluster excludes it.
  std::vector<bool> offloads_states = {false};
  // Tried with several tensor-parallel ranks. Where both are, sequence parallelism is left out if
  // the model or the plan has no prediction for it.
  std::vector<bool> sequence_parallel = {false, true};
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
  // Valid ones; variants of steps_in_backward and offloads_states count as one, checkpoints of some
  // blocks as those of all.
  int64_t num_candidates = 0;
  // Those that need more memory, among the faster ones than the last of `layouts`; among all if
  // there are fewer than max_results.
  int64_t num_above_limit = 0;
  std::optional<FoundLayout> smallest;  // the one with the least bytes, if no layout fits
  std::vector<Rejection> rejections;
};

// Tries each number of pipeline ranks, replicas, data-parallel and tensor-parallel ranks with each
// number of micro-batches, ZeRO stage and kind of checkpointing, and with and without sequence
// parallelism. Stages are divided so that the slowest is as fast as possible. Pipelines have no
// replicas, unless their number is fixed.
//
// With checkpoints of some blocks, a bound of the time is that of one block; the least number of
// blocks that fits is found by bisection, because each further one takes less memory.
//
// Branch and bound: the times of all candidates are predicted first, which is cheap, those of
// pipelines without their waits. In the order of these times, the schedule of a pipeline is
// simulated, which puts the candidate back at its place; and memory is predicted, until max_results
// candidates fit. Where offload is tried, too, the time of a candidate is a bound until its memory
// is known. So the result is that of a search of all candidates. If none fits, the memory of all of
// them is predicted, except of those whose parameters and optimizer states on the device alone take
// more than the least bytes of the earlier ones.
//
// Throws std::invalid_argument for numbers below 1, and if no candidate is valid: with the sizes
// that are fixed, for the number of devices or of sequences, for the model, or for offloads_states
// = {true}.
LayoutSearchResult search_layouts(const LayoutSearch& search);

// Returns the candidates that no other one beats in both time and memory, the fastest first, and so
// from the most to the fewest bytes; those with checkpoints of some blocks are left out. Here,
// variants with and without offload are candidates of their own. memory_limit and max_results do
// not matter. Throws like search_layouts.
std::vector<FoundLayout> search_front(const LayoutSearch& search);

}  // namespace weft::strategy
