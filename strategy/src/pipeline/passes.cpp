#include "weft/strategy/pipeline/passes.h"

#include "weft/strategy/pipeline/check.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace weft::strategy {

namespace {

using Actions = std::vector<Action>;

// The positions of a rank's compute actions in its list, by stage.
class StageUses {
 public:
  explicit StageUses(const Actions& actions) {
    for (size_t i = 0; i < actions.size(); ++i) {
      if (is_compute(actions[i].kind)) {
        uses_[actions[i].stage].push_back(i);
      }
    }
  }

  // Returns the first position from `position` on that needs the stage, or kNever.
  [[nodiscard]] size_t next(int32_t stage, size_t position) const {
    const auto& uses = uses_.at(stage);
    const auto found = std::lower_bound(uses.begin(), uses.end(), position);
    return found == uses.end() ? kNever : *found;
  }

  static constexpr size_t kNever = static_cast<size_t>(-1);

 private:
  std::map<int32_t, std::vector<size_t>> uses_;
};

// Returns one rank's list with UNSHARD and RESHARD added.
Actions with_unshards(const Actions& actions, size_t max_unsharded) {
  const StageUses uses(actions);
  Actions result;
  std::vector<int32_t> unsharded;
  const auto is_unsharded = [&](int32_t stage) {
    return std::find(unsharded.begin(), unsharded.end(), stage) != unsharded.end();
  };
  const auto unshard = [&](int32_t stage) {
    result.push_back({stage, Action::kNoMicroBatch, ActionKind::kUnshard});
    unsharded.push_back(stage);
  };
  const auto reshard = [&](std::vector<int32_t>::iterator stage) {
    result.push_back({*stage, Action::kNoMicroBatch, ActionKind::kReshard});
    unsharded.erase(stage);
  };
  for (size_t i = 0; i < actions.size(); ++i) {
    const int32_t stage = actions[i].stage;
    if (!is_compute(actions[i].kind)) {
      result.push_back(actions[i]);
      continue;
    }
    if (!is_unsharded(stage)) {
      if (unsharded.size() == max_unsharded) {
        reshard(std::max_element(unsharded.begin(), unsharded.end(), [&](int32_t a, int32_t b) {
          return uses.next(a, i) < uses.next(b, i);
        }));
      }
      unshard(stage);
    }
    const auto following = std::find_if(actions.begin() + static_cast<ptrdiff_t>(i) + 1,
                                        actions.end(),
                                        [](const Action& a) { return is_compute(a.kind); });
    if (following != actions.end() && !is_unsharded(following->stage) &&
        unsharded.size() < max_unsharded) {
      unshard(following->stage);
    }
    result.push_back(actions[i]);
    if (uses.next(stage, i + 1) == StageUses::kNever) {
      reshard(std::find(unsharded.begin(), unsharded.end(), stage));
    }
  }
  return result;
}

// Returns the schedule with `change` applied to each rank's list.
template <typename Change>
Schedule change_ranks(const Schedule& schedule, Change change) {
  std::vector<Actions> ranks;
  ranks.reserve(schedule.ranks().size());
  for (const Actions& actions : schedule.ranks()) {
    ranks.push_back(change(actions));
  }
  return Schedule(std::move(ranks));
}

// Returns the compute actions of `schedule` for which `keeps` is true, in the same order. Throws if
// the schedule has actions that are not compute actions.
template <typename Keeps>
Schedule keep_if(const Schedule& schedule, Keeps keeps) {
  if (schedule.has_communication()) {
    throw std::invalid_argument(
        "schedule: it has sends or receives already; pass a schedule of compute actions only");
  }
  for (const Actions& actions : schedule.ranks()) {
    for (const Action& action : actions) {
      if (!is_compute(action.kind)) {
        throw std::invalid_argument("schedule: it has " + to_string(action) +
                                    " already; pass a schedule of compute actions only");
      }
    }
  }
  check(schedule);
  return change_ranks(schedule, [&](const Actions& actions) {
    Actions result;
    std::copy_if(actions.begin(), actions.end(), std::back_inserter(result), keeps);
    return result;
  });
}

}  // namespace

Schedule add_unshards(const Schedule& schedule, int64_t max_unsharded) {
  if (max_unsharded < 1) {
    throw std::invalid_argument("schedule: max_unsharded is " + std::to_string(max_unsharded) +
                                "; a rank has to hold at least 1 stage to compute");
  }
  check(schedule);
  for (const Actions& actions : schedule.ranks()) {
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kUnshard) {
        throw std::invalid_argument("schedule: it has " + to_string(action) +
                                    " already; pass a schedule without UNSHARD");
      }
    }
  }
  return change_ranks(schedule, [&](const Actions& actions) {
    return with_unshards(actions, static_cast<size_t>(max_unsharded));
  });
}

Schedule merge_backwards(const Schedule& schedule) {
  check(schedule);
  const auto rank_of = schedule.rank_of();
  // Returns whether the gradient that the input half computes is sent to another rank.
  const auto sends = [&](int32_t stage) {
    const auto at = static_cast<size_t>(stage);
    return stage > 0 && rank_of[at - 1] != rank_of[at];
  };
  return change_ranks(schedule, [&](const Actions& actions) {
    Actions result;
    result.reserve(actions.size());
    for (const Action& action : actions) {
      Action* last = result.empty() ? nullptr : &result.back();
      if (last != nullptr && !sends(action.stage) && action.kind == ActionKind::kBackwardWeight &&
          *last == Action{action.stage, action.micro_batch, ActionKind::kBackwardInput}) {
        last->kind = ActionKind::kBackward;
      } else {
        result.push_back(action);
      }
    }
    return result;
  });
}

Schedule forward_only(const Schedule& schedule) {
  return keep_if(schedule, [](const Action& a) { return a.kind == ActionKind::kForward; });
}

Schedule first_micro_batches(const Schedule& schedule, int64_t num_micro_batches) {
  if (num_micro_batches < 1 || num_micro_batches > schedule.num_micro_batches()) {
    throw std::invalid_argument("schedule: got num_micro_batches " +
                                std::to_string(num_micro_batches) + " for a schedule of " +
                                std::to_string(schedule.num_micro_batches()) +
                                " micro-batches; pass 1 to as many as there are");
  }
  return keep_if(schedule, [&](const Action& a) { return a.micro_batch < num_micro_batches; });
}

}  // namespace weft::strategy
