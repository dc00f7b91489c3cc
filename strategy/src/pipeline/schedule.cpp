#include "weft/strategy/pipeline/schedule.h"

#include "../text.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace weft::strategy {

namespace {

constexpr int32_t kNowhere = -1;
constexpr size_t kMaxStages = size_t{1} << 24;

}  // namespace

Schedule::Schedule(std::vector<std::vector<Action>> ranks) : ranks_(std::move(ranks)) {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    bool computes = false;
    for (const Action& action : ranks_[rank]) {
      if (action.stage < 0 || action.micro_batch < Action::kNoMicroBatch) {
        throw std::invalid_argument("schedule: " + strategy::to_string(action) + " on rank " +
                                    std::to_string(rank) +
                                    " has a negative number; count stages and micro-batches "
                                    "from 0");
      }
      const auto stage = static_cast<size_t>(action.stage);
      // Stages are limited, because memory is allocated up to the highest stage.
      if (stage >= rank_of_.size() && stage < kMaxStages) {
        rank_of_.resize(stage + 1, kNowhere);
      }
      if (stage >= rank_of_.size()) {
        throw std::invalid_argument("schedule: " + strategy::to_string(action) +
                                    " has a stage above " + std::to_string(kMaxStages - 1) +
                                    "; use a smaller one");
      }
      if (rank_of_[stage] != kNowhere && std::cmp_not_equal(rank_of_[stage], rank)) {
        throw std::invalid_argument("schedule: stage " + std::to_string(stage) + " is on rank " +
                                    std::to_string(rank_of_[stage]) + " and on rank " +
                                    std::to_string(rank) + "; give it to one of them");
      }
      rank_of_[stage] = static_cast<int32_t>(rank);
      computes |= is_compute(action.kind);
      has_communication_ |= is_communication(action.kind);
      has_backward_ |= is_compute(action.kind) && action.kind != ActionKind::kForward;
      num_micro_batches_ = std::max(num_micro_batches_, int64_t{action.micro_batch} + 1);
    }
    if (!computes) {
      throw std::invalid_argument("schedule: rank " + std::to_string(rank) +
                                  " computes nothing; give each rank a stage, or use fewer ranks");
    }
  }
  const auto missing = std::find(rank_of_.begin(), rank_of_.end(), kNowhere);
  if (missing != rank_of_.end()) {
    throw std::invalid_argument(
        "schedule: no rank has stage " + std::to_string(missing - rank_of_.begin()) + " of " +
        std::to_string(rank_of_.size()) + "; number the stages from 0 without a gap");
  }
}

Schedule Schedule::parse(std::string_view csv) {
  std::vector<std::vector<Action>> ranks;
  if (!csv.empty() && csv.back() == '\n') {
    csv.remove_suffix(1);
  }
  if (detail::trim(csv).empty()) {
    return {};
  }
  for (const std::string_view line : detail::split(csv, '\n')) {
    std::vector<Action>& actions = ranks.emplace_back();
    for (const std::string_view cell : detail::split(line, ',')) {
      const std::string_view text = detail::trim(cell);
      if (text.empty()) {
        continue;
      }
      try {
        actions.push_back(parse_action(text));
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("schedule, line " + std::to_string(ranks.size()) + ": " +
                                    error.what());
      }
    }
  }
  return Schedule(std::move(ranks));
}

std::string Schedule::to_string() const {
  std::string text;
  for (const std::vector<Action>& actions : ranks_) {
    for (size_t i = 0; i < actions.size(); ++i) {
      text += i == 0 ? "" : ",";
      text += strategy::to_string(actions[i]);
    }
    text += '\n';
  }
  return text;
}

}  // namespace weft::strategy
