#include "traversal.h"

#include "../text.h"

#include <algorithm>
#include <deque>

namespace weft::strategy::detail {

Traversal::Traversal(const Schedule& schedule, int64_t channel_capacity)
    : schedule_(schedule),
      channel_capacity_(channel_capacity),
      has_communication_(schedule.has_communication()),
      ahead_forward_(static_cast<size_t>(schedule.num_stages())),
      ahead_backward_(static_cast<size_t>(schedule.num_stages())),
      positions_(static_cast<size_t>(schedule.num_ranks())) {
  const auto num_cells = static_cast<size_t>(schedule.num_stages() * schedule.num_micro_batches());
  outputs_.resize(num_cells);
  gradients_.resize(num_cells);
  forwards_.resize(num_cells);
}

size_t Traversal::cell(int64_t stage, int64_t micro_batch) const {
  return static_cast<size_t>(stage * schedule_.num_micro_batches() + micro_batch);
}

bool Traversal::on_other_rank(int64_t stage, int64_t other) const {
  const auto rank_of = schedule_.rank_of();
  return other >= 0 && other < schedule_.num_stages() &&
         rank_of[static_cast<size_t>(stage)] != rank_of[static_cast<size_t>(other)];
}

bool Traversal::is_ready(const Action& action) const {
  const int64_t stage = action.stage;
  switch (action.kind) {
    case ActionKind::kForward:
      return stage == 0 || outputs_[cell(stage - 1, action.micro_batch)] != 0;
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      return forwards_[cell(stage, action.micro_batch)] != 0 &&
             (stage + 1 == schedule_.num_stages() ||
              gradients_[cell(stage + 1, action.micro_batch)] != 0);
    case ActionKind::kSendForward:
      return ahead_forward_[static_cast<size_t>(stage + 1)] < channel_capacity_;
    case ActionKind::kSendBackward:
      return ahead_backward_[static_cast<size_t>(stage - 1)] < channel_capacity_;
    default:
      return true;
  }
}

void Traversal::finish(const Action& action) {
  const int64_t stage = action.stage;
  switch (action.kind) {
    case ActionKind::kForward:
      forwards_[cell(stage, action.micro_batch)] = 1;
      if (!has_communication_ || !on_other_rank(stage, stage + 1)) {
        outputs_[cell(stage, action.micro_batch)] = 1;
      }
      break;
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      if (!has_communication_ || !on_other_rank(stage, stage - 1)) {
        gradients_[cell(stage, action.micro_batch)] = 1;
      }
      break;
    case ActionKind::kSendForward:
      outputs_[cell(stage, action.micro_batch)] = 1;
      ++ahead_forward_[static_cast<size_t>(stage + 1)];
      break;
    case ActionKind::kSendBackward:
      gradients_[cell(stage, action.micro_batch)] = 1;
      ++ahead_backward_[static_cast<size_t>(stage - 1)];
      break;
    case ActionKind::kRecvForward:
      --ahead_forward_[static_cast<size_t>(stage)];
      break;
    case ActionKind::kRecvBackward:
      --ahead_backward_[static_cast<size_t>(stage)];
      break;
    default:
      break;
  }
}

bool Traversal::run(const Visit& visit) {
  const auto& ranks = schedule_.ranks();
  const auto rank_of = schedule_.rank_of();
  std::deque<size_t> queue;
  std::vector<uint8_t> is_queued(ranks.size(), 1);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    queue.push_back(rank);
  }
  const auto wake = [&](int64_t stage) {
    if (stage < 0 || stage >= schedule_.num_stages()) {
      return;
    }
    const auto rank = static_cast<size_t>(rank_of[static_cast<size_t>(stage)]);
    if (is_queued[rank] == 0) {
      is_queued[rank] = 1;
      queue.push_back(rank);
    }
  };
  while (!queue.empty()) {
    const size_t rank = queue.front();
    queue.pop_front();
    size_t& position = positions_[rank];
    for (; position < ranks[rank].size() && is_ready(ranks[rank][position]); ++position) {
      const Action& action = ranks[rank][position];
      visit(rank, action);
      finish(action);
      wake(action.stage - 1);
      wake(action.stage + 1);
    }
    is_queued[rank] = 0;
  }
  return std::equal(
      positions_.begin(),
      positions_.end(),
      ranks.begin(),
      [](size_t position, const auto& actions) { return position == actions.size(); });
}

std::string Traversal::describe_deadlock() const {
  std::vector<std::string> blocked_ranks;
  for (size_t rank = 0; rank < positions_.size(); ++rank) {
    if (positions_[rank] < schedule_.ranks()[rank].size()) {
      if (blocked_ranks.size() == 4) {
        blocked_ranks.emplace_back("...");
        break;
      }
      blocked_ranks.push_back("rank " + std::to_string(rank) + " at " +
                              strategy::to_string(schedule_.ranks()[rank][positions_[rank]]));
    }
  }
  return join(blocked_ranks, ", ");
}

}  // namespace weft::strategy::detail
