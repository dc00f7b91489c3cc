#include "weft/strategy/tuning/step_time.h"

#include "../memory/stage_run.h"
#include "cached_step_time.h"
#include "data_parallel.h"
#include "layer_work.h"
#include "optimizer_step.h"
#include "weft/strategy/pipeline/partition.h"
#include "weft/strategy/pipeline/simulate.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace weft::strategy {

namespace {

using detail::axis_size;
using detail::DataParallel;
using detail::ModelWork;
using detail::OptimizerStep;
using detail::Work;
using detail::WorkCache;

// Returns the seconds for which a device waits for communication, when each `communication[i]` runs
// beside `compute[i]`.
double exposed_seconds(const std::vector<double>& communication,
                       const std::vector<double>& compute,
                       bool overlaps) {
  double exposed = 0;
  for (std::size_t i = 0; i < communication.size(); ++i) {
    exposed += overlaps ? std::max(0.0, communication[i] - compute[i]) : communication[i];
  }
  return exposed;
}

// Returns the seconds of one micro-batch; the last one also reduces gradients. Units run in the
// order root, blocks; the head, which belongs to the root unit, runs at the end.
double data_parallel_seconds(const std::vector<Work>& units,
                             const DataParallel& collectives,
                             bool overlaps,
                             bool is_last) {
  const auto reduce_seconds = [&](const Work& unit) {
    return is_last ? collectives.reduce_seconds(unit) : 0;
  };
  const std::size_t num = units.size();
  // Forward: unit i + 1 is gathered beside unit i, the first two before anything can compute.
  std::vector<double> gathers = {collectives.gather_seconds(units[0])};
  std::vector<double> beside = {0};
  for (std::size_t i = 1; i < num; ++i) {
    gathers.push_back(collectives.gather_seconds(units[i]));
    beside.push_back(i == 1 ? 0 : units[i - 1].forward + units[i - 1].forward_sums);
  }
  double exposed = exposed_seconds(gathers, beside, overlaps);
  // Backward: beside block i, block i - 1 is gathered and the gradients of block i + 1 are reduced.
  // The last block stays gathered after the forward, and the root's gradients are reduced last.
  std::vector<double> messages;
  beside.clear();
  for (std::size_t i = num; i-- > 1;) {
    messages.push_back((i > 1 ? collectives.gather_again_seconds(units[i - 1]) : 0) +
                       (i + 1 < num ? reduce_seconds(units[i + 1]) : 0));
    beside.push_back(units[i].backward + units[i].recomputed + units[i].backward_sums +
                     units[i].recomputed_sums);
  }
  if (num > 1) {
    messages.push_back(reduce_seconds(units[1]));
    beside.push_back(0);
  }
  messages.push_back(reduce_seconds(units[0]));
  beside.push_back(0);
  exposed += exposed_seconds(messages, beside, overlaps);
  return exposed;
}

// Adds `num` forwards and backwards of some layers.
void add_work(StepTime& time, const Work& work, double num) {
  time.compute += num * (work.forward + work.backward);
  time.recomputation += num * (work.recomputed + work.recomputed_sums);
  time.tensor_parallel += num * (work.forward_sums + work.backward_sums);
  time.model_flops += num * 3 * work.flops;
  time.sent_bytes += num * work.sent_bytes;
}

// Adds what follows the last backward: the step, and gathers of what was stepped. `layers`: of the
// rank, in the order of the forward.
void add_step(StepTime& time,
              double num_elements,
              const std::vector<Work>& layers,
              const DataParallel& collectives,
              const TrainingSpec& spec,
              const Cluster& cluster) {
  time.data_parallel += collectives.gather_stepped_seconds(num_elements);
  time.sent_bytes += collectives.gather_stepped_bytes(num_elements);
  const OptimizerStep step(spec, cluster);
  time.optimizer =
      step.overlaps() ? step.seconds_after_backward(layers) : step.seconds(num_elements);
}

// Returns the layers of a model in the order of the forward. The gradients of FSDP2's root unit,
// which has the last layer, are reduced with those of the first.
std::vector<Work> stepped_layers(const ModelWork& model, const TrainingSpec& spec) {
  std::vector<Work> layers = model.layers;
  if (layers.size() > 1 && detail::num_fsdp_shards(spec) > 1) {
    layers.front().elements += layers.back().elements;
    layers.back().elements = 0;
  }
  return layers;
}

// The stages of a pipeline, with their work for micro-batches of each size.
class Stages {
 public:
  Stages(const TrainingSpec& spec, WorkCache& cache)
      : spec_(spec),
        cluster_(cache.cluster()),
        model_(std::get<DecoderModel>(spec.model)),
        stages_(detail::stages_of(model_, spec)),
        sizes_(detail::micro_batch_sizes(spec)),
        num_ranks_(axis_size(spec.mesh, "pipeline_parallel")),
        rank_of_(detail::ranks_of_stages(spec)),
        row_bytes_(static_cast<double>(spec.tokens * model_.dim * detail::residual_bytes(spec))) {
    for (const int64_t size : sizes_) {
      if (!work_.contains(size)) {
        TrainingSpec of_size = spec;
        of_size.sequences = size;
        const ModelWork& of_model = cache.work_of(of_size);
        if (size == sizes_.front()) {
          layers_ = &of_model.layers;
        }
        for (const detail::StageLayers& stage : stages_) {
          work_[size].push_back(detail::work_of(stage, model_, of_model));
        }
      }
    }
  }

  // Returns the time of the rank that ends last; with `simulates`, `pipeline` has the time for
  // which it waits. All ranks end the schedule together; then they reduce gradients and step.
  [[nodiscard]] StepTime step_time(bool simulates) const {
    const DataParallel collectives(spec_, cluster_);
    const double schedule_seconds = simulates ? simulated_seconds() : 0;
    std::optional<StepTime> last;
    double model_flops = 0;
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      StepTime time = time_of(rank, collectives);
      model_flops += time.model_flops / static_cast<double>(num_ranks_);
      const double busy = time.compute + time.recomputation + time.tensor_parallel;
      time.pipeline += std::max(0.0, schedule_seconds - busy);
      const bool is_busier = last && time.total() == last->total() && time.compute > last->compute;
      if (!last || time.total() > last->total() || is_busier) {
        last = time;
      }
    }
    last->model_flops = model_flops;
    return *last;
  }

 private:
  [[nodiscard]] StepTime time_of(int64_t rank, const DataParallel& collectives) const {
    StepTime time;
    double num_elements = 0;
    std::vector<Work> layers;
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      if (rank_of_[i] != rank) {
        continue;
      }
      for (const int64_t size : sizes_) {
        add_work(time, work_.at(size)[i], 1);
        const double num_bytes = row_bytes_ * static_cast<double>(size);
        const bool sends_back = i > 0 && rank_of_[i - 1] != rank;
        const bool sends_on = i + 1 < stages_.size() && rank_of_[i + 1] != rank;
        time.sent_bytes += (sends_back ? num_bytes : 0) + (sends_on ? num_bytes : 0);
      }
      num_elements += work_.at(sizes_.front())[i].elements;
      // Layers are gathered before the first forward, and reduced after the last backward.
      for (const Work& layer : layers_on(stages_[i])) {
        time.data_parallel += collectives.gather_seconds(layer) + collectives.reduce_seconds(layer);
        time.sent_bytes += collectives.gather_bytes(layer, true) + collectives.reduce_bytes(layer);
        layers.push_back(layer);
      }
    }
    const int64_t first_rank = rank_of_.front();
    const int64_t last_rank = rank_of_.back();
    if (model_.is_tied && first_rank != last_rank && (rank == first_rank || rank == last_rank)) {
      // The ranks with the copies of the tied weight exchange its gradients.
      const double num_bytes =
          layers_->front().elements * 4 / static_cast<double>(detail::num_fsdp_shards(spec_));
      const LinkRates link = link_between(first_rank, last_rank);
      time.pipeline += link.seconds_per_message + num_bytes / link.bytes_per_second;
      time.sent_bytes += num_bytes;
    }
    add_step(time, num_elements, layers, collectives, spec_, cluster_);
    return time;
  }

  [[nodiscard]] std::vector<Work> layers_on(const detail::StageLayers& stage) const {
    const std::vector<Work>& layers = *layers_;
    std::vector<Work> own;
    if (stage.has_embedding) {
      own.push_back(layers.front());
    }
    for (int64_t block = stage.first_block; block < stage.last_block; ++block) {
      own.push_back(layers.at(static_cast<std::size_t>(block) + 1));
    }
    if (stage.has_head) {
      own.push_back(layers.back());
      if (model_.is_tied) {  // a copy of the embedding's weight, whose gradient is complete last
        own.insert(own.begin(), {.elements = layers.front().elements});
      }
    }
    return own;
  }

  // Returns the link of a device between two pipeline ranks: that within a host only if all devices
  // of both ranks are on one. The pipeline axis is the outermost.
  [[nodiscard]] LinkRates link_between(int64_t one, int64_t other) const {
    const int64_t distance = spec_.mesh.size() / num_ranks_;
    const int64_t first = std::min(one, other) * distance / cluster_.devices_per_host;
    const int64_t last = ((std::max(one, other) + 1) * distance - 1) / cluster_.devices_per_host;
    return first == last ? cluster_.within_host : cluster_.across_hosts;
  }

  [[nodiscard]] double simulated_seconds() const {
    std::vector<StageCost> costs;
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      const LinkRates link =
          link_between(rank_of_[i], rank_of_[std::min(i + 1, stages_.size() - 1)]);
      for (const int64_t size : sizes_) {
        const Work& work = work_.at(size)[i];
        const double num_bytes = row_bytes_ * static_cast<double>(size);
        costs.push_back({.forward = work.forward_seconds(),
                         .backward_input = work.backward_seconds() / 2,
                         .backward_weight = work.backward_seconds() / 2,
                         .transfer = link.seconds_per_message + num_bytes / link.bytes_per_second});
      }
    }
    const auto stages_per_rank = static_cast<int64_t>(stages_.size()) / num_ranks_;
    const Schedule schedule = generate(spec_.pipeline->schedule,
                                       {.num_ranks = num_ranks_,
                                        .num_micro_batches = static_cast<int64_t>(sizes_.size()),
                                        .stages_per_rank = stages_per_rank});
    return simulate(schedule, costs).makespan;
  }

  const TrainingSpec& spec_;
  const Cluster& cluster_;
  const DecoderModel& model_;
  std::vector<detail::StageLayers> stages_;
  std::vector<int64_t> sizes_;  // sequences of each micro-batch
  int64_t num_ranks_;
  std::vector<int32_t> rank_of_;               // of each stage
  double row_bytes_;                           // that cross a boundary for a sequence
  const std::vector<Work>* layers_ = nullptr;  // of the first size; elements are those of all
  std::map<int64_t, std::vector<Work>> work_;  // by size, of each stage
};

}  // namespace

StepTime detail::step_time(const TrainingSpec& spec, WorkCache& cache, bool simulates) {
  const Cluster& cluster = cache.cluster();
  if (spec.pipeline) {
    return Stages(spec, cache).step_time(simulates);
  }
  const ModelWork& of_model = cache.work_of(spec);
  const std::vector<Work> units = detail::units_of(of_model);
  const DataParallel collectives(spec, cluster);
  const auto num = static_cast<double>(spec.micro_batches);
  StepTime time;
  double num_elements = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Work& unit = units[i];
    add_work(time, unit, num);
    const bool stays_gathered = i == 0 || i + 1 == units.size();
    time.sent_bytes +=
        num * collectives.gather_bytes(unit, stays_gathered) + collectives.reduce_bytes(unit);
    num_elements += unit.elements;
  }
  const bool overlaps = cluster.device.overlaps;
  time.data_parallel = (num - 1) * data_parallel_seconds(units, collectives, overlaps, false) +
                       data_parallel_seconds(units, collectives, overlaps, true);
  add_step(time, num_elements, stepped_layers(of_model, spec), collectives, spec, cluster);
  return time;
}

std::vector<int64_t> detail::even_stages(const TrainingSpec& spec,
                                         WorkCache& cache,
                                         int64_t num_stages) {
  const std::vector<Work>& layers = cache.work_of(spec).layers;
  std::vector<LayerCost> blocks;
  for (std::size_t i = 1; i + 1 < layers.size(); ++i) {
    Work work = layers[i];
    if (i == 1) {
      work += layers.front();
    }
    if (i + 2 == layers.size()) {
      work += layers.back();
    }
    blocks.push_back({.time = work.forward_seconds() + work.backward_seconds()});
  }
  const Partition found = partition(blocks, {.num_stages = num_stages});
  return {found.begins.begin() + 1, found.begins.end()};
}

StepTime predict_step_time(const TrainingSpec& spec, const Cluster& cluster) {
  distinct_ranks(spec);  // checks the spec
  WorkCache cache(cluster);
  return detail::step_time(spec, cache, true);
}

StepTime least_step_time(const TrainingSpec& spec, const Cluster& cluster) {
  distinct_ranks(spec);
  WorkCache cache(cluster);
  return detail::step_time(spec, cache, false);
}

std::vector<int64_t> even_stages(const TrainingSpec& spec,
                                 const Cluster& cluster,
                                 int64_t num_stages) {
  WorkCache cache(cluster);
  return detail::even_stages(spec, cache, num_stages);
}

}  // namespace weft::strategy
