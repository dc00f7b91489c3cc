#include "weft/strategy/pipeline/simulate.h"

#include "simulate_checked.h"
#include "traversal.h"
#include "weft/strategy/pipeline/check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace weft::strategy {

namespace {

// One cost for all stages, one for each stage, or one for each stage and micro-batch.
class Costs {
 public:
  Costs(const Schedule& schedule, std::span<const StageCost> costs)
      : costs_(costs),
        num_stages_(static_cast<size_t>(schedule.num_stages())),
        num_micro_batches_(static_cast<size_t>(schedule.num_micro_batches())),
        is_per_micro_batch_(costs.size() == num_stages_ * num_micro_batches_) {
    if (num_stages_ == 0) {
      throw std::invalid_argument("simulate: the schedule has no actions; pass one with actions");
    }
    if (costs.size() != 1 && costs.size() != num_stages_ && !is_per_micro_batch_) {
      throw std::invalid_argument(
          "simulate: " + std::to_string(costs.size()) + " costs for " +
          std::to_string(num_stages_) + " stages and " + std::to_string(num_micro_batches_) +
          " micro-batches; pass one for all, one for each stage, or one for each stage and "
          "micro-batch");
    }
    for (size_t i = 0; i < costs.size(); ++i) {
      check(costs[i], costs.size() == 1 ? 0 : is_per_micro_batch_ ? i / num_micro_batches_ : i);
    }
    check_sum();
  }

  [[nodiscard]] const StageCost& at(size_t stage, size_t micro_batch) const {
    if (is_per_micro_batch_) {
      return costs_[stage * num_micro_batches_ + micro_batch];
    }
    return costs_[costs_.size() == 1 ? 0 : stage];
  }
  [[nodiscard]] const StageCost& at(const Action& action) const {
    return at(static_cast<size_t>(action.stage), static_cast<size_t>(action.micro_batch));
  }

 private:
  static void check(const StageCost& cost, size_t stage) {
    for (const double time :
         {cost.forward, cost.backward_input, cost.backward_weight, cost.transfer}) {
      if (!std::isfinite(time) || time < 0) {
        throw std::invalid_argument("simulate: a time of stage " + std::to_string(stage) + " is " +
                                    std::to_string(time) + "; pass times from 0 on");
      }
    }
    if (cost.activation_bytes < 0 || cost.parameter_bytes < 0) {
      throw std::invalid_argument("simulate: bytes of stage " + std::to_string(stage) +
                                  " are negative; pass bytes from 0 on");
    }
  }

  void check_sum() const {
    double bytes = 0;
    for (size_t stage = 0; stage < num_stages_; ++stage) {
      bytes += static_cast<double>(at(stage, 0).parameter_bytes);
      for (size_t i = 0; i < num_micro_batches_; ++i) {
        bytes += static_cast<double>(at(stage, i).activation_bytes);
      }
    }
    if (bytes > 4e18) {  // below 2^62
      throw std::invalid_argument(
          "simulate: the stages' bytes add up to more than can be counted; pass smaller ones");
    }
  }

  std::span<const StageCost> costs_;
  size_t num_stages_;
  size_t num_micro_batches_;
  bool is_per_micro_batch_;
};

double duration(const Action& action, const StageCost& cost) {
  switch (action.kind) {
    case ActionKind::kForward:
      return cost.forward;
    case ActionKind::kBackward:
      return cost.backward_input + cost.backward_weight;
    case ActionKind::kBackwardInput:
      return cost.backward_input;
    case ActionKind::kBackwardWeight:
      return cost.backward_weight;
    default:
      return 0;
  }
}

bool ends_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

// Counts the micro-batches and bytes that are held, which depend only on the order of each rank's
// own list.
class Holdings {
 public:
  Holdings(const Schedule& schedule, const Costs& costs, Simulation& result)
      : costs_(costs), result_(result), counts_(static_cast<size_t>(schedule.num_stages())) {
    result.in_flight.resize(counts_.size());
    result.peak_bytes.resize(schedule.ranks().size());
    bytes_.resize(schedule.ranks().size());
    for (size_t stage = 0; stage < counts_.size(); ++stage) {
      bytes_[static_cast<size_t>(schedule.rank_of()[stage])] += costs.at(stage, 0).parameter_bytes;
    }
    result.peak_bytes = bytes_;
    keeps_activations_ = schedule.has_backward();
  }

  void count(size_t rank, const Action& action) {
    const auto stage = static_cast<size_t>(action.stage);
    if (action.kind == ActionKind::kForward) {
      result_.in_flight[stage] = std::max(result_.in_flight[stage], ++counts_[stage]);
      bytes_[rank] += costs_.at(action).activation_bytes;
      result_.peak_bytes[rank] = std::max(result_.peak_bytes[rank], bytes_[rank]);
    }
    // Without backwards, nothing is kept after the forward.
    if (ends_backward(action.kind) ||
        (!keeps_activations_ && action.kind == ActionKind::kForward)) {
      --counts_[stage];
      bytes_[rank] -= costs_.at(action).activation_bytes;
    }
  }

 private:
  const Costs& costs_;
  Simulation& result_;
  std::vector<int64_t> counts_;  // micro-batches in flight, by stage
  std::vector<int64_t> bytes_;   // held, by rank
  bool keeps_activations_ = true;
};

// The times at which results arrive on their consumers' ranks, by stage and micro-batch.
class Arrivals {
 public:
  explicit Arrivals(const Schedule& schedule)
      : num_micro_batches_(static_cast<size_t>(schedule.num_micro_batches())),
        num_stages_(schedule.num_stages()),
        outputs_(static_cast<size_t>(schedule.num_stages()) * num_micro_batches_),
        gradients_(outputs_.size()) {}

  // Returns when an action's input from another stage arrives; 0 if it has none.
  [[nodiscard]] double input(const Action& action) const {
    const int64_t stage = action.stage;
    if (action.kind == ActionKind::kForward && stage > 0) {
      return outputs_[cell(stage - 1, action)];
    }
    const bool is_backward =
        action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
    return is_backward && stage + 1 < num_stages_ ? gradients_[cell(stage + 1, action)] : 0;
  }

  void set_output(const Action& action, double time) {
    outputs_[cell(action.stage, action)] = time;
  }
  void set_gradient(const Action& action, double time) {
    gradients_[cell(action.stage, action)] = time;
  }

 private:
  [[nodiscard]] size_t cell(int64_t stage, const Action& action) const {
    return static_cast<size_t>(stage) * num_micro_batches_ +
           static_cast<size_t>(action.micro_batch);
  }

  size_t num_micro_batches_;
  int64_t num_stages_;
  std::vector<double> outputs_;
  std::vector<double> gradients_;
};

Simulation run(const Schedule& schedule, const Costs& costs) {
  Simulation result;
  result.ranks.resize(schedule.ranks().size());
  Holdings holdings(schedule, costs, result);
  Arrivals arrivals(schedule);
  std::vector<double> clocks(schedule.ranks().size());
  double busy = 0;
  const auto rank_of = schedule.rank_of();
  const auto delay = [&](const Action& action, int64_t other) {
    const int64_t stage = action.stage;
    const bool crosses = other >= 0 && other < schedule.num_stages() &&
                         rank_of[static_cast<size_t>(stage)] != rank_of[static_cast<size_t>(other)];
    const auto first = static_cast<size_t>(std::max<int64_t>(0, std::min(stage, other)));
    return crosses ? costs.at(first, static_cast<size_t>(action.micro_batch)).transfer : 0;
  };
  detail::Traversal traversal(schedule, std::numeric_limits<int64_t>::max() / 2);
  traversal.run([&](size_t rank, const Action& action) {
    double& clock = clocks[rank];
    if (is_compute(action.kind)) {
      const double start = std::max(clock, arrivals.input(action));
      clock = start + duration(action, costs.at(action));
      busy += clock - start;
      result.ranks[rank].push_back({action, start, clock});
      result.makespan = std::max(result.makespan, clock);
      holdings.count(rank, action);
    }
    const bool sends_output =
        action.kind == ActionKind::kForward || action.kind == ActionKind::kSendForward;
    const bool sends_gradient = action.kind == ActionKind::kBackward ||
                                action.kind == ActionKind::kBackwardInput ||
                                action.kind == ActionKind::kSendBackward;
    if (sends_output) {
      arrivals.set_output(action, clock + delay(action, action.stage + 1));
    } else if (sends_gradient) {
      arrivals.set_gradient(action, clock + delay(action, action.stage - 1));
    }
  });
  const double total = result.makespan * static_cast<double>(schedule.num_ranks());
  result.bubble_fraction = total > 0 ? 1 - busy / total : 0;
  return result;
}

}  // namespace

Simulation simulate(const Schedule& schedule, std::span<const StageCost> stage_costs) {
  const Costs costs(schedule, stage_costs);
  check(schedule, std::numeric_limits<int64_t>::max() / 2);
  return run(schedule, costs);
}

Simulation detail::simulate_checked(const Schedule& schedule,
                                    std::span<const StageCost> stage_costs) {
  return run(schedule, Costs(schedule, stage_costs));
}

}  // namespace weft::strategy
