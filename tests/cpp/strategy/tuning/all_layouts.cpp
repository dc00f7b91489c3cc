#include "all_layouts.h"

#include "models.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>

namespace weft::strategy {

LayoutSearch small_search(int64_t num_devices, int64_t memory_limit) {
  LayoutSearch search;
  search.training.model = tuned_decoder(4);
  search.training.tokens = 64;
  search.cluster = named_cluster("cpu");
  search.cluster.devices_per_host = 4;
  search.num_devices = num_devices;
  search.global_sequences = 24;
  search.memory_limit = memory_limit;
  search.max_results = 10'000;
  return search;
}

int64_t peak_bytes(const TrainingSpec& training) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < training.mesh.size(); ++rank) {
    for (const PhaseMemory& phase : predict_memory(training, rank)) {
      most = std::max(most, phase.at_peak.total());
    }
  }
  return most;
}

namespace {

constexpr std::initializer_list<Checkpointing> kCheckpointing = {
    Checkpointing::kNone, Checkpointing::kSelective, Checkpointing::kFull};

std::vector<bool> step_options(const TrainingSpec& training) {
  return training.zero_stage == 1 ? std::vector<bool>{false} : std::vector<bool>{false, true};
}

// Returns the values of offloads_states with which the states fit into the memory of hosts.
std::vector<bool> offload_options(const TrainingSpec& training, const LayoutSearch& search) {
  std::vector<bool> options = search.offloads_states;
  int64_t most = 0;
  for (int64_t rank = 0; rank < training.mesh.size() && training.zero_stage != 1; ++rank) {
    TrainingSpec offloaded = training;
    offloaded.offloads_states = search.training.device == DeviceKind::kCuda;
    most = std::max(most, offloaded_bytes(offloaded, rank));
  }
  const int64_t num_on_host = std::min(search.cluster.devices_per_host, training.mesh.size());
  if (training.zero_stage == 1 || most * num_on_host > search.cluster.host_bytes) {
    std::erase(options, true);
  }
  return options;
}

bool fits(const TrainingSpec& training, const LayoutSearch& search) {
  return peak_bytes(training) <= search.memory_limit;
}

// Returns the seconds of the faster one of the steps after and in the backward that fits.
std::optional<double> fitting_seconds(TrainingSpec training,
                                      bool offloads,
                                      const LayoutSearch& search) {
  std::optional<double> fastest;
  training.offloads_states = offloads;
  for (const bool in_backward : step_options(training)) {
    training.steps_in_backward = in_backward;
    if (fits(training, search)) {
      const double seconds = predict_step_time(training, search.cluster).total();
      fastest = std::min(seconds, fastest.value_or(seconds));
    }
  }
  return fastest;
}

// The same with the fewest checkpoints that fit, of `num_blocks` on a rank; without offload, for
// steps in the backward only if those after it do not fit.
std::optional<double> fitting_seconds_of_blocks(TrainingSpec training,
                                                bool offloads,
                                                int64_t num_blocks,
                                                const LayoutSearch& search) {
  std::optional<double> fastest;
  training.offloads_states = offloads;
  for (const bool in_backward : step_options(training)) {
    training.steps_in_backward = in_backward;
    for (int64_t blocks = 1; blocks < num_blocks && (offloads || !fastest); ++blocks) {
      training.checkpointed_blocks = blocks;
      if (fits(training, search)) {
        const double seconds = predict_step_time(training, search.cluster).total();
        fastest = std::min(seconds, fastest.value_or(seconds));
        break;
      }
    }
  }
  return fastest;
}

// Adds the seconds of a training if it fits; and those with the fewest checkpoints that fit, of
// `num_blocks` on a rank, if it does not fit without. Offload is chosen for what does not fit
// without.
void add_fitting(const TrainingSpec& training,
                 int64_t num_blocks,
                 const LayoutSearch& search,
                 std::vector<double>& seconds) {
  const std::vector<bool> options = offload_options(training, search);
  for (const bool offloads : options) {
    if (const auto found = fitting_seconds(training, offloads, search)) {
      seconds.push_back(*found);
      break;
    }
  }
  TrainingSpec without = training;
  without.checkpointing = Checkpointing::kNone;
  for (const bool offloads : options) {
    if (training.checkpointing != Checkpointing::kFull ||
        fitting_seconds(without, offloads, search)) {
      return;
    }
    if (const auto found = fitting_seconds_of_blocks(training, offloads, num_blocks, search)) {
      seconds.push_back(*found);
      return;
    }
  }
}

// The same for a mesh without pipeline ranks, with each number of micro-batches.
void add_accumulating(const TrainingSpec& training,
                      int64_t num_data,
                      const LayoutSearch& search,
                      std::vector<double>& seconds) {
  for (int64_t micro_batches = 1; micro_batches <= search.global_sequences; ++micro_batches) {
    if (search.global_sequences % (num_data * micro_batches) == 0) {
      TrainingSpec of_batches = training;
      of_batches.sequences = search.global_sequences / num_data / micro_batches;
      of_batches.micro_batches = micro_batches;
      for (const Checkpointing checkpointing : kCheckpointing) {
        of_batches.checkpointing = checkpointing;
        add_fitting(of_batches, 4, search, seconds);
      }
    }
  }
}

void add_pipelines(const TrainingSpec& training,
                   int64_t num_data,
                   const LayoutSearch& search,
                   std::vector<double>& seconds) {
  const int64_t num_ranks = training.mesh.size("pipeline_parallel");
  const int64_t sequences = search.global_sequences / num_data;
  for (const auto& [kind, stages_per_rank] :
       {std::pair(ScheduleKind::kOneForwardOneBackward, int64_t{1}),
        std::pair(ScheduleKind::kInterleaved, int64_t{2})}) {
    for (int64_t micro_batches = 1; micro_batches <= sequences; ++micro_batches) {
      if (sequences % micro_batches != 0 || num_ranks * stages_per_rank > 4) {
        continue;
      }
      for (const Checkpointing checkpointing : kCheckpointing) {
        TrainingSpec of_stages = training;
        of_stages.mesh = Mesh({{"tensor_parallel", training.mesh.size("tensor_parallel")}});
        of_stages.sequence_parallel = training.sequence_parallel;
        of_stages.sequences = sequences / micro_batches;
        of_stages.checkpointing = checkpointing;
        TrainingSpec pipeline = training;
        pipeline.sequences = sequences;
        pipeline.checkpointing = checkpointing;
        pipeline.pipeline = {
            .first_blocks = even_stages(of_stages, search.cluster, num_ranks * stages_per_rank),
            .schedule = kind,
            .micro_batches = micro_batches};
        const int64_t most = num_ranks == 1 ? 4 : num_ranks == 4 ? 1 : 2;
        add_fitting(pipeline, most, search, seconds);
      }
    }
  }
}

}  // namespace

std::vector<double> all_that_fit(const LayoutSearch& search) {
  std::vector<double> seconds;
  for (const int64_t pipeline : {1, 2, 3, 4}) {  // of four blocks
    for (int64_t replicas = 1; replicas <= search.num_devices; ++replicas) {
      for (int64_t data = 1; data <= search.num_devices; ++data) {
        for (const int64_t tensor : {1, 2, 4}) {  // four heads of keys
          const bool is_left_out = pipeline > 1 && replicas > 1;
          if (pipeline * replicas * data * tensor != search.num_devices || is_left_out ||
              search.global_sequences % (replicas * data) != 0) {
            continue;
          }
          for (const int64_t zero_stage : {1, 2, 3}) {
            if ((data == 1 && zero_stage < 3) || (pipeline > 1 && zero_stage == 2)) {
              continue;
            }
            TrainingSpec training = search.training;
            training.zero_stage = zero_stage;
            training.mesh = Mesh({{"pipeline_parallel", pipeline},
                                  {"data_replicate", replicas},
                                  {"data_parallel", data},
                                  {"tensor_parallel", tensor}});
            for (const bool sequence_parallel : {false, true}) {
              training.sequence_parallel = sequence_parallel;
              if (sequence_parallel && tensor == 1) {
                continue;
              }
              if (pipeline == 1) {
                add_accumulating(training, replicas * data, search, seconds);
              } else {
                add_pipelines(training, replicas * data, search, seconds);
              }
            }
          }
        }
      }
    }
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

}  // namespace weft::strategy
