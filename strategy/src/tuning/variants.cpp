#include "variants.h"

#include "../memory/check_training.h"
#include "../memory/parameters.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace weft::strategy::detail {

namespace {

bool shards_states_only(const TrainingSpec& training) {
  return training.zero_stage == 1 && axis_size(training.mesh, "data_parallel") > 1;
}

}  // namespace

std::vector<bool> step_options_of(const LayoutSearch& search) {
  std::vector<bool> options = search.steps_in_backward;
  if (search.training.optimizer == OptimizerKind::kAdagrad) {
    std::erase(options, true);
  }
  return options;
}

std::vector<bool> step_options_of(const LayoutSearch& search, const TrainingSpec& training) {
  std::vector<bool> options = step_options_of(search);
  if (shards_states_only(training)) {
    std::erase(options, true);
  }
  return options;
}

std::vector<bool> offload_options_of(const LayoutSearch& search) {
  const auto has = [&](bool value) {
    const std::vector<bool>& values = search.offloads_states;
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  if (!has(false)) {
    return {true};
  }
  if (!has(true)) {
    return {false};
  }
  try {
    check_offload(search.training);
    check_hosts(search.cluster);
  } catch (const std::invalid_argument&) {
    return {false};
  }
  return {false, true};
}

std::vector<bool> offload_options_of(const LayoutSearch& search, const TrainingSpec& training) {
  std::vector<bool> options = offload_options_of(search);
  if (shards_states_only(training)) {
    std::erase(options, true);
  }
  return options;
}

std::vector<Variant> variants_of(const Candidate& candidate, WorkCache& cache) {
  std::vector<Variant> variants;
  for (const bool offloads : candidate.offloads_states) {
    for (const bool in_backward : candidate.steps_in_backward) {
      Variant variant = {.training = candidate.training};
      variant.training.offloads_states = offloads;
      variant.training.steps_in_backward = in_backward;
      if (offloads) {
        variant.least_seconds = step_time(variant.training, cache, false).total();
      }
      variants.push_back(std::move(variant));
    }
  }
  std::stable_sort(variants.begin(), variants.end(), [](const auto& one, const auto& other) {
    return std::pair(one.training.offloads_states, one.least_seconds) <
           std::pair(other.training.offloads_states, other.least_seconds);
  });
  return variants;
}

void predict_times(Candidate& candidate, WorkCache& cache, bool simulates) {
  const std::vector<Variant> variants = variants_of(candidate, cache);
  const TrainingSpec& first = variants.front().training;
  candidate.time = step_time(first, cache, simulates);
  candidate.is_simulated = simulates || !first.pipeline;
  candidate.least_seconds = candidate.time.total();
  for (const Variant& variant : variants) {
    if (variant.training.offloads_states && !first.offloads_states) {
      candidate.least_seconds = std::min(candidate.least_seconds, variant.least_seconds);
    }
  }
}

bool HostMemory::fits(const TrainingSpec& training) {
  if (!training.offloads_states) {
    return true;
  }
  const PipelineSpec pipeline = training.pipeline.value_or(PipelineSpec());
  const Key key = {
      training.mesh.to_string(), training.zero_stage, pipeline.first_blocks, pipeline.schedule};
  const auto [found, is_new] = known_.try_emplace(key);
  if (is_new) {
    int64_t most = 0;
    for (const RankClass& each : distinct_ranks(training)) {
      most = std::max(most, offloaded_bytes(training, each.global_rank));
    }
    found->second = most <= cluster_.host_bytes / num_on_host(cluster_, training.mesh.size());
  }
  return found->second;
}

}  // namespace weft::strategy::detail
