#include "stage_run.h"

#include "weft/strategy/pipeline/micro_batches.h"
#include "weft/strategy/pipeline/passes.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

namespace weft::strategy::detail {

namespace {

using Key = std::pair<int32_t, int32_t>;  // stage and micro-batch

// Returns the actions of the ranks, with their communication and, for parameters that FSDP2 shards,
// the gathers of stages.
Schedule schedule_of(const TrainingSpec& spec) {
  const int64_t num_ranks = axis_size(spec.mesh, "pipeline_parallel");
  const auto num_stages = static_cast<int64_t>(spec.pipeline->first_blocks.size()) + 1;
  // Schedules that run backwards as early as possible repeat themselves once the pipeline is full.
  const ScheduleKind kind = spec.pipeline->schedule;
  const bool repeats =
      kind == ScheduleKind::kOneForwardOneBackward || kind == ScheduleKind::kInterleaved;
  const int64_t num_micro_batches = spec.pipeline->micro_batches;
  const int64_t stages_per_rank = num_stages / num_ranks;
  const Schedule schedule = merge_backwards(
      generate(spec.pipeline->schedule,
               {.num_ranks = num_ranks,
                .num_micro_batches =
                    repeats ? std::min(num_micro_batches, 2 * num_stages) : num_micro_batches,
                .stages_per_rank = stages_per_rank}));
  const Schedule communicating = add_communication(schedule);
  return num_fsdp_shards(spec) == 1
             ? communicating
             : add_unshards(communicating, std::min<int64_t>(2, stages_per_rank));
}

class StageRun {
 public:
  StageRun(RankMemory& memory,
           const DecoderModel& model,
           const TrainingSpec& spec,
           int64_t pipeline_rank,
           Timeline& timeline)
      : memory_(memory),
        model_(model),
        spec_(spec),
        schedule_(schedule_of(spec)),
        rank_(static_cast<int32_t>(pipeline_rank)),
        stages_(stages_of(model, spec)),
        sizes_(micro_batch_sizes(spec)),
        timeline_(timeline) {}

  void run() {
    hold_rings();
    for (const Action& action : schedule_.ranks().at(static_cast<std::size_t>(rank_))) {
      num_backwards_left_[action.stage] += action.kind == ActionKind::kBackward ? 1 : 0;
    }
    for (const Action& action : schedule_.ranks().at(static_cast<std::size_t>(rank_))) {
      run_action(action);
    }
    sent_.clear();
    for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
      if (schedule_.rank_of()[stage] == rank_) {
        for (const int64_t unit : memory_.units_of(stages_[stage])) {
          memory_.reduce_gradients(unit);
        }
      }
    }
    memory_.sum_tied_gradients();
  }

 private:
  // Neighbours exchange outputs and their gradients, for each micro-batch.
  void hold_rings() {
    std::set<int32_t> peers;
    for (std::size_t stage = 0; stage + 1 < stages_.size(); ++stage) {
      const int32_t one = schedule_.rank_of()[stage];
      const int32_t other = schedule_.rank_of()[stage + 1];
      if (one == rank_ || other == rank_) {
        peers.insert(one == rank_ ? other : one);
      }
    }
    peers.erase(rank_);
    const int64_t num_bytes = memory_.wide_bytes(spec_.sequences * spec_.tokens * model_.dim);
    memory_.hold_rings(static_cast<int64_t>(peers.size()), num_bytes);
  }

  void run_action(const Action& action) {
    const Key key = {action.stage, action.micro_batch};
    switch (action.kind) {
      case ActionKind::kForward:
        timeline_.begin_phase("forward");
        forward(key);
        break;
      case ActionKind::kBackward:
        timeline_.begin_phase("backward");
        backward(key);
        break;
      case ActionKind::kRecvForward:
        inputs_[key] = boundary(MemoryCategory::kSavedActivations, action.micro_batch);
        break;
      case ActionKind::kRecvBackward:
        output_gradients_[key] = boundary(MemoryCategory::kScratch, action.micro_batch);
        break;
      // A message is in flight until the next one on its channel.
      case ActionKind::kSendForward:
        sent_[{action.stage, 0}] = take(outputs_, key);
        break;
      case ActionKind::kSendBackward:
        sent_[{action.stage, 1}] = take(input_gradients_, key);
        break;
      case ActionKind::kUnshard:
        memory_.unshard(memory_.units_of(stage_of(action.stage)));
        break;
      case ActionKind::kReshard:
        for (const int64_t unit : memory_.units_of(stage_of(action.stage))) {
          memory_.reshard(unit);
        }
        break;
      case ActionKind::kBackwardInput:  // such schedules have no prediction
      case ActionKind::kBackwardWeight:
        break;
    }
  }

  void forward(Key key) {
    const auto [stage, micro_batch] = key;
    Buffer& input = inputs_[key];
    if (stage > 0 && is_here(stage - 1)) {
      input = take(outputs_, {stage - 1, micro_batch});
    }
    auto part = std::make_unique<DecoderPart>(
        memory_, model_, stage_of(stage), spec_, sizes_.at(static_cast<std::size_t>(micro_batch)));
    outputs_[key] = part->forward(input);
    parts_[key] = std::move(part);
  }

  void backward(Key key) {
    const auto [stage, micro_batch] = key;
    const bool next_is_here = std::cmp_less(stage + 1, stages_.size()) && is_here(stage + 1);
    const Buffer grad = next_is_here ? take(input_gradients_, {stage + 1, micro_batch})
                                     : take(output_gradients_, key);
    memory_.set_completes_gradients(--num_backwards_left_[stage] == 0);
    input_gradients_[key] = parts_.at(key)->backward(grad);
    parts_.erase(key);
    inputs_.erase(key);
  }

  Buffer boundary(MemoryCategory category, int32_t micro_batch) {
    return memory_.hold_bytes(category, memory_.wide_bytes(num_rows(micro_batch) * model_.dim));
  }

  static Buffer take(std::map<Key, Buffer>& buffers, Key key) {
    const auto found = buffers.find(key);
    if (found == buffers.end()) {
      return {};
    }
    Buffer buffer = std::move(found->second);
    buffers.erase(found);
    return buffer;
  }

  [[nodiscard]] bool is_here(int32_t stage) const {
    return schedule_.rank_of()[static_cast<std::size_t>(stage)] == rank_;
  }
  [[nodiscard]] const StageLayers& stage_of(int32_t stage) const {
    return stages_.at(static_cast<std::size_t>(stage));
  }
  [[nodiscard]] int64_t num_rows(int32_t micro_batch) const {
    return sizes_.at(static_cast<std::size_t>(micro_batch)) * spec_.tokens;
  }

  RankMemory& memory_;
  const DecoderModel& model_;
  const TrainingSpec& spec_;
  Schedule schedule_;
  int32_t rank_;
  std::vector<StageLayers> stages_;
  std::vector<int64_t> sizes_;
  Timeline& timeline_;
  std::map<int32_t, int64_t> num_backwards_left_;
  std::map<Key, Buffer> inputs_;            // of stages, until their backward
  std::map<Key, Buffer> outputs_;           // of stages, for the next one
  std::map<Key, Buffer> output_gradients_;  // received
  std::map<Key, Buffer> input_gradients_;   // for the previous stage
  std::map<Key, Buffer> sent_;              // by channel: the last message
  std::map<Key, std::unique_ptr<DecoderPart>> parts_;
};

}  // namespace

std::vector<int64_t> micro_batch_sizes(const TrainingSpec& spec) {
  const std::vector<double> shares(static_cast<std::size_t>(spec.pipeline->micro_batches), 1.0);
  return deal_samples(spec.sequences, shares);
}

void run_stages(RankMemory& memory,
                const DecoderModel& model,
                const TrainingSpec& spec,
                int64_t global_rank,
                Timeline& timeline) {
  const int64_t rank = coordinate_on(spec.mesh, "pipeline_parallel", global_rank);
  StageRun(memory, model, spec, rank, timeline).run();
}

}  // namespace weft::strategy::detail
