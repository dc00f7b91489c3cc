// Simulates the schedule, with a send right after each action whose output another rank needs, and
// writes each rank's new list in the process. A receive is posted `prefetch` actions before the
// action that needs it or, if all ranks would block before that, at its rank's current position.

#include "../text.h"
#include "traversal.h"
#include "weft/strategy/pipeline/check.h"
#include "weft/strategy/pipeline/passes.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace weft::strategy {

namespace {

// The messages that one stage receives in one direction, in the order of their sends.
struct Channel {
  size_t receiver_rank = 0;
  std::vector<int32_t> order;     // micro-batches
  std::vector<size_t> positions;  // of each micro-batch in `order`
  size_t num_sent = 0;
  size_t num_posted = 0;
};

class CommunicationPass {
 public:
  CommunicationPass(const Schedule& schedule, const CommunicationOptions& options)
      : schedule_(schedule),
        options_(options),
        channels_(2 * static_cast<size_t>(schedule.num_stages())),
        lists_(schedule.ranks().size()),
        positions_(schedule.ranks().size()),
        unsent_(schedule.ranks().size()) {
    for (const auto& actions : schedule.ranks()) {
      for (const Action& action : actions) {
        if (const auto idx = output_channel(action)) {
          Channel& channel = channels_[*idx];
          channel.positions.resize(static_cast<size_t>(schedule.num_micro_batches()));
          channel.positions[static_cast<size_t>(action.micro_batch)] = channel.order.size();
          channel.order.push_back(action.micro_batch);
        }
        if (const auto idx = input_channel(action)) {
          channels_[*idx].receiver_rank = rank_of(action.stage);
        }
      }
    }
  }

  Schedule run() {
    for (;;) {
      bool moved = false;
      for (size_t rank = 0; rank < lists_.size(); ++rank) {
        while (step(rank)) {
          moved = true;
        }
      }
      if (moved) {
        continue;
      }
      const auto blocked = std::find_if(
          unsent_.begin(), unsent_.end(), [](const auto& action) { return action.has_value(); });
      if (blocked == unsent_.end()) {
        return Schedule(std::move(lists_));
      }
      // All ranks are blocked, and this send has no receive: post one where its receiver is now.
      const size_t idx = *output_channel(**blocked);
      post(idx, channels_[idx].num_posted + 1);
    }
  }

 private:
  [[nodiscard]] size_t rank_of(int64_t stage) const {
    return static_cast<size_t>(schedule_.rank_of()[static_cast<size_t>(stage)]);
  }

  // Returns the index of the channel between `stage` and `neighbour`; nullopt if there is no such
  // neighbour or it is on the same rank. Channels are in the order of the receiving stages, forward
  // channels before backward ones.
  [[nodiscard]] std::optional<size_t> channel_idx(int64_t stage,
                                                  int64_t neighbour,
                                                  int64_t receiving_stage,
                                                  bool is_forward) const {
    if (neighbour < 0 || neighbour >= schedule_.num_stages() ||
        rank_of(stage) == rank_of(neighbour)) {
      return std::nullopt;
    }
    return static_cast<size_t>(receiving_stage + (is_forward ? 0 : schedule_.num_stages()));
  }

  // Return the channels of an action's output and of its input.
  [[nodiscard]] std::optional<size_t> output_channel(const Action& action) const {
    const int64_t stage = action.stage;
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kSendForward:
        return channel_idx(stage, stage + 1, stage + 1, true);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kSendBackward:
        return channel_idx(stage, stage - 1, stage - 1, false);
      default:
        return std::nullopt;
    }
  }

  [[nodiscard]] std::optional<size_t> input_channel(const Action& action) const {
    const int64_t stage = action.stage;
    switch (action.kind) {
      case ActionKind::kForward:
        return channel_idx(stage, stage - 1, stage, true);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        return channel_idx(stage, stage + 1, stage, false);
      default:
        return std::nullopt;
    }
  }

  // Posts receives until `count` receives of the channel are posted.
  void post(size_t idx, size_t count) {
    Channel& channel = channels_[idx];
    const auto num_stages = static_cast<size_t>(schedule_.num_stages());
    const bool is_forward = idx < num_stages;
    for (; channel.num_posted < count; ++channel.num_posted) {
      lists_[channel.receiver_rank].push_back(
          {static_cast<int32_t>(is_forward ? idx : idx - num_stages),
           channel.order[channel.num_posted],
           is_forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward});
    }
  }

  // Posts the receive that `action` needs, if any, and those of earlier messages on its channel.
  void post_input(const Action& action) {
    if (const auto idx = input_channel(action)) {
      const Channel& channel = channels_[*idx];
      post(*idx, channel.positions[static_cast<size_t>(action.micro_batch)] + 1);
    }
  }

  // Returns whether an action's input from another rank has been sent. check() has verified that
  // actions on the same rank that compute an input are earlier in the list.
  [[nodiscard]] bool has_input(const Action& action) const {
    const auto idx = input_channel(action);
    return !idx || channels_[*idx].num_sent >
                       channels_[*idx].positions[static_cast<size_t>(action.micro_batch)];
  }

  // Advances a rank by one action; returns false if it is blocked or done.
  bool step(size_t rank) {
    if (unsent_[rank]) {
      return send(rank);
    }
    const std::vector<Action>& actions = schedule_.ranks()[rank];
    if (positions_[rank] == actions.size()) {
      return false;
    }
    const Action& action = actions[positions_[rank]];
    for (int64_t ahead = 0; ahead <= options_.prefetch; ++ahead) {
      const size_t position = positions_[rank] + static_cast<size_t>(ahead);
      if (position < actions.size()) {
        post_input(actions[position]);
      }
    }
    if (!has_input(action)) {
      return false;
    }
    lists_[rank].push_back(action);
    ++positions_[rank];
    if (output_channel(action)) {
      unsent_[rank] = Action{action.stage,
                             action.micro_batch,
                             action.kind == ActionKind::kForward ? ActionKind::kSendForward
                                                                 : ActionKind::kSendBackward};
    }
    return true;
  }

  bool send(size_t rank) {
    Channel& channel = channels_[*output_channel(*unsent_[rank])];
    if (channel.num_sent + 1 >
        channel.num_posted + static_cast<size_t>(options_.channel_capacity)) {
      return false;
    }
    ++channel.num_sent;
    lists_[rank].push_back(*unsent_[rank]);
    unsent_[rank].reset();
    return true;
  }

  const Schedule& schedule_;
  const CommunicationOptions& options_;
  std::vector<Channel> channels_;
  std::vector<std::vector<Action>> lists_;     // the new lists, by rank
  std::vector<size_t> positions_;              // of the next action to read, by rank
  std::vector<std::optional<Action>> unsent_;  // the send that comes next, by rank
};

}  // namespace

Schedule add_communication(const Schedule& schedule, const CommunicationOptions& options) {
  if (options.channel_capacity < 0 || options.prefetch < 0) {
    throw std::invalid_argument("schedule: got channel_capacity " +
                                std::to_string(options.channel_capacity) + " and prefetch " +
                                std::to_string(options.prefetch) + "; pass 0 or more for both");
  }
  if (schedule.has_communication()) {
    throw std::invalid_argument(
        "schedule: it has sends or receives already; pass a schedule without them");
  }
  check(schedule);
  return CommunicationPass(schedule, options).run();
}

}  // namespace weft::strategy
