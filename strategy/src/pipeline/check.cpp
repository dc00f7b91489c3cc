#include "weft/strategy/pipeline/check.h"

#include "traversal.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace weft::strategy {

namespace {

[[noreturn]] void throw_invalid(const Action& action, const std::string& problem) {
  throw std::invalid_argument("schedule: " + to_string(action) + " " + problem);
}

// One bit for each kind of action.
constexpr uint16_t bit(ActionKind kind) {
  return static_cast<uint16_t>(uint16_t{1} << static_cast<uint16_t>(kind));
}

// Checks each rank's list separately: the actions of each stage and micro-batch, and their order.
class RankChecker {
 public:
  explicit RankChecker(const Schedule& schedule) : schedule_(schedule) {
    check_counts();
    seen_.resize(static_cast<size_t>(schedule.num_stages() * schedule.num_micro_batches()));
    unsharded_.resize(static_cast<size_t>(schedule.num_stages()));
    for (const auto& actions : schedule.ranks()) {
      for (const Action& action : actions) {
        has_sharding_ |= action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard;
      }
    }
  }

  void check_all() {
    for (const auto& actions : schedule_.ranks()) {
      for (const Action& action : actions) {
        check_action(action);
      }
    }
    for (int32_t stage = 0; stage < schedule_.num_stages(); ++stage) {
      if (unsharded_[static_cast<size_t>(stage)]) {
        throw_invalid({stage, Action::kNoMicroBatch, ActionKind::kUnshard},
                      "has no RESHARD after it; add one");
      }
      for (int32_t i = 0; i < schedule_.num_micro_batches(); ++i) {
        check_complete(stage, i);
      }
    }
  }

 private:
  // Called before memory is allocated for every stage and micro-batch, because one high index would
  // allocate much of it.
  void check_counts() const {
    int64_t num_forwards = 0;
    for (const auto& actions : schedule_.ranks()) {
      for (const Action& action : actions) {
        num_forwards += action.kind == ActionKind::kForward ? 1 : 0;
      }
    }
    const int64_t expected = schedule_.num_stages() * schedule_.num_micro_batches();
    if (num_forwards != expected) {
      throw std::invalid_argument("schedule: " + std::to_string(num_forwards) + " forwards for " +
                                  std::to_string(schedule_.num_stages()) + " stages and " +
                                  std::to_string(schedule_.num_micro_batches()) +
                                  " micro-batches; write each stage's forward of each micro-batch "
                                  "once, " +
                                  std::to_string(expected) + " in all");
    }
  }

  [[nodiscard]] bool crosses(const Action& action, int64_t neighbour) const {
    if (neighbour < 0 || neighbour >= schedule_.num_stages()) {
      return false;
    }
    const auto rank_of = schedule_.rank_of();
    return rank_of[static_cast<size_t>(action.stage)] != rank_of[static_cast<size_t>(neighbour)];
  }

  [[nodiscard]] bool output_crosses(const Action& action) const {
    return schedule_.has_communication() && crosses(action, action.stage + 1);
  }

  [[nodiscard]] bool input_crosses(const Action& action) const {
    return schedule_.has_communication() && crosses(action, action.stage - 1);
  }

  void check_action(const Action& action) {
    if (action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard) {
      check_sharding(action);
      return;
    }
    if (action.micro_batch < 0) {
      throw_invalid(action, "has no micro-batch; number them from 0");
    }
    uint16_t& seen = seen_[static_cast<size_t>(action.stage * schedule_.num_micro_batches() +
                                               action.micro_batch)];
    if ((seen & bit(action.kind)) != 0) {
      throw_invalid(action, "comes twice; remove one");
    }
    check_order(action, seen);
    if (is_compute(action.kind) && has_sharding_ &&
        !unsharded_[static_cast<size_t>(action.stage)]) {
      throw_invalid(action, "comes while its stage is sharded; put an UNSHARD before it");
    }
    seen = static_cast<uint16_t>(seen | bit(action.kind));
  }

  void check_sharding(const Action& action) {
    const bool gathers = action.kind == ActionKind::kUnshard;
    const auto stage = static_cast<size_t>(action.stage);
    if (unsharded_[stage] == gathers) {
      throw_invalid(action,
                    gathers ? "comes while its stage is unsharded; remove it"
                            : "comes while its stage is sharded; remove it");
    }
    unsharded_[stage] = gathers;
  }

  // `seen`: the earlier actions of this stage and micro-batch.
  void check_order(const Action& action, uint16_t seen) const {
    const auto require = [&](ActionKind kind, const char* problem) {
      if ((seen & bit(kind)) == 0) {
        throw_invalid(action,
                      std::string(problem) + "; put " +
                          to_string(Action{action.stage, action.micro_batch, kind}) + " before it");
      }
    };
    const auto require_backward_input = [&](const char* problem) {
      if ((seen & (bit(ActionKind::kBackward) | bit(ActionKind::kBackwardInput))) == 0) {
        throw_invalid(action, problem);
      }
    };
    switch (action.kind) {
      case ActionKind::kForward:
        if (input_crosses(action)) {
          require(ActionKind::kRecvForward, "needs an input that no receive was posted for");
        }
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        require(ActionKind::kForward, "comes before its forward");
        if (output_crosses(action)) {
          require(ActionKind::kRecvBackward, "needs a gradient that no receive was posted for");
        }
        if ((seen & (bit(ActionKind::kBackward) | bit(ActionKind::kBackwardInput))) != 0) {
          throw_invalid(action, "comes after another backward of the same micro-batch; remove one");
        }
        break;
      case ActionKind::kBackwardWeight:
        require(ActionKind::kBackwardInput,
                "comes before the half that gives the input's gradient");
        break;
      case ActionKind::kSendForward:
        check_crossing(action, output_crosses(action));
        require(ActionKind::kForward, "sends an output that is not computed yet");
        break;
      case ActionKind::kSendBackward:
        check_crossing(action, input_crosses(action));
        require_backward_input(
            "sends a gradient that is not computed yet; put the backward before it");
        break;
      case ActionKind::kRecvForward:
        check_crossing(action, input_crosses(action));
        break;
      case ActionKind::kRecvBackward:
        check_crossing(action, output_crosses(action));
        break;
      default:
        break;
    }
  }

  static void check_crossing(const Action& action, bool crosses) {
    if (!crosses) {
      throw_invalid(action, "crosses no boundary between ranks; remove it");
    }
  }

  void check_complete(int32_t stage, int32_t micro_batch) const {
    const uint16_t seen =
        seen_[static_cast<size_t>(stage * schedule_.num_micro_batches() + micro_batch)];
    const auto require = [&](ActionKind kind) {
      if ((seen & bit(kind)) == 0) {
        throw_invalid({stage, micro_batch, kind}, "is missing; add it");
      }
    };
    const Action action{stage, micro_batch, ActionKind::kForward};
    require(ActionKind::kForward);
    if (output_crosses(action)) {
      require(ActionKind::kSendForward);
    }
    if (!schedule_.has_backward()) {
      for (const ActionKind kind : {ActionKind::kSendBackward, ActionKind::kRecvBackward}) {
        if ((seen & bit(kind)) != 0) {
          throw_invalid({stage, micro_batch, kind},
                        "belongs to a backward, and there is none; remove it");
        }
      }
      return;
    }
    if ((seen & bit(ActionKind::kBackwardInput)) != 0) {
      require(ActionKind::kBackwardWeight);
    } else {
      require(ActionKind::kBackward);
    }
    if (input_crosses(action)) {
      require(ActionKind::kSendBackward);
    }
  }

  const Schedule& schedule_;
  std::vector<uint16_t> seen_;   // by stage and micro-batch, a bit for each kind
  std::vector<bool> unsharded_;  // by stage
  bool has_sharding_ = false;    // whether any stage is unsharded or resharded
};

// Throws unless the receives of each channel are in the order of its sends.
void check_message_order(const Schedule& schedule) {
  const auto num_stages = static_cast<size_t>(schedule.num_stages());
  const auto num_micro_batches = static_cast<size_t>(schedule.num_micro_batches());
  // The micro-batch of each send, by channel and by position on it. A channel is indexed by the
  // stage that receives, with backward channels after the forward ones.
  std::vector<int32_t> sent(2 * num_stages * num_micro_batches);
  std::vector<size_t> num_sent(2 * num_stages);
  for (const auto& actions : schedule.ranks()) {
    for (const Action& action : actions) {
      const auto stage = static_cast<size_t>(action.stage);
      size_t channel = 0;
      if (action.kind == ActionKind::kSendForward) {
        channel = stage + 1;
      } else if (action.kind == ActionKind::kSendBackward) {
        channel = num_stages + stage - 1;
      } else {
        continue;
      }
      sent[channel * num_micro_batches + num_sent[channel]++] = action.micro_batch;
    }
  }
  std::vector<size_t> num_received(2 * num_stages);
  for (const auto& actions : schedule.ranks()) {
    for (const Action& action : actions) {
      const auto stage = static_cast<size_t>(action.stage);
      if (action.kind != ActionKind::kRecvForward && action.kind != ActionKind::kRecvBackward) {
        continue;
      }
      const size_t channel = action.kind == ActionKind::kRecvForward ? stage : num_stages + stage;
      if (sent[channel * num_micro_batches + num_received[channel]++] != action.micro_batch) {
        throw_invalid(action,
                      "is posted out of the order in which the other stage sends; reorder it");
      }
    }
  }
}

}  // namespace

void check(const Schedule& schedule, int64_t channel_capacity) {
  if (channel_capacity < 0) {
    throw std::invalid_argument("schedule: a channel's capacity is " +
                                std::to_string(channel_capacity) + "; pass 0 or more");
  }
  RankChecker(schedule).check_all();
  if (schedule.has_communication()) {
    check_message_order(schedule);
  }
  detail::Traversal traversal(schedule, channel_capacity);
  if (!traversal.run([](size_t, const Action&) {})) {
    throw std::invalid_argument(
        "schedule: the ranks would deadlock: " + traversal.describe_deadlock() +
        "; reorder their actions, or post receives earlier");
  }
}

}  // namespace weft::strategy
