// A pass is a forward or the input half of a backward. A micro-batch has four passes on each rank:
// its forwards go down the V (through the ranks' first stages, from rank 0 on) and up again
// (through their second stages), and its input halves go down (second stages) and up (first
// stages). All actions count as one unit of time.
//
// A block is the start of each pass of one micro-batch. A rank has six actions for each
// micro-batch, so the next micro-batch repeats the block six units later: in the steady state, no
// rank is idle. A valid block gives a rank's four passes starts that differ modulo six; the two
// other units are for weight halves. The repeated blocks give each rank an order of its passes. The
// shorter a micro-batch stays in its block, the fewer micro-batches are in flight.
//
// The blocks leave ranks idle before and after the steady state. Packing removes idle time: it
// counts units of time and gives each rank, in each unit, one action: the next pass of its order
// or, if that has no input yet, a weight half or a later pass that has its input. It never exceeds
// a limit of forwards whose weight half is not done:
// - A forward at the limit waits, and the rank computes a weight half instead.
// - A forward is taken early only if the limit also holds for the passes that it overtakes, counted
//   as if each input half ended its forward at once.
// Hence packing does not deadlock: the pass with the earliest start among those that are left is
// the next one of its rank, has its input, and a forward at the limit has a weight half to wait
// for.

#include "v_schedules.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

namespace weft::strategy::detail {

namespace {

using Actions = std::vector<Action>;

constexpr size_t kNumPasses = 4;
constexpr int64_t kPeriod = 6;

struct Block {
  // The units between a pass's starts on neighbouring ranks, for each of the four passes.
  std::array<int64_t, kNumPasses> steps;
  // The idle units on rank 0 between the last forward and the first input half, and on the last
  // rank between its two input halves: without them, the rank's starts are equal modulo six.
  int64_t wait_at_loss;
  int64_t wait_at_crossing;
  int64_t limit;  // of forwards on a rank, each of one stage, whose weight half is not done
};

Block block_of(ScheduleKind kind, int64_t p) {
  switch (kind) {
    case ScheduleKind::kZeroBubbleV:
      return {{3, 3, 3, 3}, 0, 0, 2 * p};
    case ScheduleKind::kVHalf:
      return {{2, 1, 2, 1}, p % 2 == 0 ? 3 : 0, 1, 2 * (p / 2 + 1)};
    case ScheduleKind::kVMin:
      return {{1, 1, 1, 1}, p % 3 == 0 ? 2 : 0, 0, 2 * ((p + 4) / 3)};
    default:
      throw std::logic_error("pack_blocks: a schedule kind without a block");
  }
}

// Returns the starts of the first micro-batch's passes on a rank.
std::array<int64_t, kNumPasses> starts_of(const Block& block, int64_t p, int64_t rank) {
  const int64_t up = p - 1 - rank;  // the distance from the last rank
  const auto& steps = block.steps;
  const int64_t second_forward = steps[0] * (p - 1) + 1;  // on the last rank
  const int64_t first_half = second_forward + steps[1] * (p - 1) + 1 + block.wait_at_loss;
  const int64_t last_half = first_half + steps[2] * (p - 1) + 1 + block.wait_at_crossing;
  return {steps[0] * rank,
          second_forward + steps[1] * up,
          first_half + steps[2] * rank,
          last_half + steps[3] * up};
}

// A rank's passes of all micro-batches in the order of the repeated blocks.
struct Order {
  Actions passes;
  std::vector<uint8_t> is_done;                   // of each pass
  size_t next = 0;                                // the first pass that is not done
  std::array<int64_t, kNumPasses> num_left = {};  // not done, of each of the block's passes
};

// The index in a block of a rank's pass.
size_t idx_of(const Action& pass, int64_t p) {
  const bool is_second = pass.stage >= p;
  return pass.kind == ActionKind::kForward ? (is_second ? 1 : 0) : (is_second ? 2 : 3);
}

Order make_order(const Block& block, int64_t p, int64_t m, int64_t rank) {
  const auto starts = starts_of(block, p, rank);
  std::vector<std::pair<int64_t, Action>> timed;
  timed.reserve(kNumPasses * static_cast<size_t>(m));
  const auto first = static_cast<int32_t>(rank);
  const auto second = static_cast<int32_t>(2 * p - 1 - rank);
  for (int32_t i = 0; i < m; ++i) {
    const int64_t begin = kPeriod * i;
    timed.emplace_back(begin + starts[0], Action{first, i, ActionKind::kForward});
    timed.emplace_back(begin + starts[1], Action{second, i, ActionKind::kForward});
    timed.emplace_back(begin + starts[2], Action{second, i, ActionKind::kBackwardInput});
    timed.emplace_back(begin + starts[3], Action{first, i, ActionKind::kBackwardInput});
  }
  std::ranges::sort(timed, {}, [](const auto& each) { return each.first; });
  Order order{.passes = {}, .is_done = std::vector<uint8_t>(timed.size())};
  order.passes.reserve(timed.size());
  for (const auto& [start, pass] : timed) {
    order.passes.push_back(pass);
  }
  order.num_left.fill(m);
  return order;
}

// Whether a rank whose next pass has no input yet takes a later one.
enum class Early {
  kNever,
  kWhenIdle,  // if no weight half waits
  kBeforeWeightHalves,
};

class Packing {
 public:
  Packing(const Block& block, int64_t p, int64_t m, Early early)
      : num_ranks_(p),
        num_micro_batches_(m),
        limit_(block.limit),
        early_(early),
        lists_(static_cast<size_t>(p)),
        delayed_(lists_.size()),
        num_held_(lists_.size()),
        num_begun_(lists_.size()),
        has_output_(static_cast<size_t>(2 * p * m)),
        has_gradient_(has_output_.size()) {
    for (int64_t rank = 0; rank < p; ++rank) {
      orders_.push_back(make_order(block, p, m, rank));
      lists_[static_cast<size_t>(rank)].reserve(static_cast<size_t>(kPeriod * m));
    }
  }

  // Returns the lists of the ranks; call it once.
  std::vector<Actions> run() {
    const int64_t num_actions = kPeriod * num_micro_batches_ * num_ranks_;
    for (int64_t num_done = 0; num_done < num_actions; ++num_units_) {
      std::vector<Action> done;  // in this unit: their results are ready in the next one
      for (size_t rank = 0; rank < lists_.size(); ++rank) {
        if (const auto action = take(rank)) {
          lists_[rank].push_back(*action);
          done.push_back(*action);
        }
      }
      if (done.empty()) {
        throw std::logic_error("pack_blocks: no rank can continue");
      }
      for (const Action& action : done) {
        if (action.kind != ActionKind::kBackwardWeight) {
          (action.kind == ActionKind::kForward ? has_output_ : has_gradient_)[cell(action)] = 1;
        }
      }
      num_done += static_cast<int64_t>(done.size());
    }
    return std::move(lists_);
  }

  // The time at which the last rank ends, after run().
  [[nodiscard]] int64_t num_units() const { return num_units_; }

 private:
  [[nodiscard]] size_t cell(const Action& action, int64_t distance = 0) const {
    return static_cast<size_t>((action.stage + distance) * num_micro_batches_ + action.micro_batch);
  }

  [[nodiscard]] bool has_input(const Action& pass) const {
    if (pass.kind == ActionKind::kForward) {
      return pass.stage == 0 || has_output_[cell(pass, -1)] != 0;
    }
    return has_output_[cell(pass)] != 0 &&
           (pass.stage + 1 == 2 * num_ranks_ || has_gradient_[cell(pass, 1)] != 0);
  }

  // Takes the rank's action of this unit; nullopt: it is idle.
  std::optional<Action> take(size_t rank) {
    Order& order = orders_[rank];
    std::optional<size_t> position;
    if (order.next < order.passes.size()) {
      const Action& next = order.passes[order.next];
      if (has_input(next)) {
        if (next.kind != ActionKind::kForward || num_held_[rank] < limit_) {
          position = order.next;
        }
      } else if (early_ == Early::kBeforeWeightHalves ||
                 (early_ == Early::kWhenIdle && num_held_[rank] == num_begun_[rank])) {
        position = find_early(rank);
      }
    }
    return position ? take_pass(rank, *position) : take_weight_half(rank);
  }

  // Returns the position of a pass that has its input and overtakes the next one.
  [[nodiscard]] std::optional<size_t> find_early(size_t rank) const {
    const Order& order = orders_[rank];
    std::array<bool, kNumPasses> is_seen = {};
    for (size_t i = 0; i < kNumPasses; ++i) {
      is_seen[i] = order.num_left[i] == 0;
    }
    // The forwards whose input half is not done: now, after each overtaken pass, and at most.
    int64_t num_begun = num_begun_[rank];
    int64_t most_begun = num_begun;
    for (size_t position = order.next; position < order.passes.size(); ++position) {
      if (order.is_done[position] != 0) {
        continue;
      }
      const Action& pass = order.passes[position];
      const bool is_forward = pass.kind == ActionKind::kForward;
      bool& seen = is_seen[idx_of(pass, num_ranks_)];
      // Micro-batches pass through a stage in order.
      if (!seen && has_input(pass) &&
          (!is_forward || (num_held_[rank] < limit_ && most_begun < limit_))) {
        return position;
      }
      seen = true;
      if (std::ranges::all_of(is_seen, [](bool each) { return each; })) {
        break;
      }
      num_begun += is_forward ? 1 : -1;
      most_begun = std::max(most_begun, num_begun);
    }
    return std::nullopt;
  }

  Action take_pass(size_t rank, size_t position) {
    Order& order = orders_[rank];
    const Action pass = order.passes[position];
    order.is_done[position] = 1;
    --order.num_left[idx_of(pass, num_ranks_)];
    while (order.next < order.passes.size() && order.is_done[order.next] != 0) {
      ++order.next;
    }
    if (pass.kind == ActionKind::kForward) {
      ++num_held_[rank];
      ++num_begun_[rank];
    } else {
      --num_begun_[rank];
      delayed_[rank].push_back({pass.stage, pass.micro_batch, ActionKind::kBackwardWeight});
    }
    return pass;
  }

  std::optional<Action> take_weight_half(size_t rank) {
    // Every forward that is held and whose input half is done waits for its weight half.
    const int64_t num_waiting = num_held_[rank] - num_begun_[rank];
    if (num_waiting == 0) {
      return std::nullopt;
    }
    --num_held_[rank];
    return delayed_[rank][delayed_[rank].size() - static_cast<size_t>(num_waiting)];
  }

  int64_t num_ranks_;
  int64_t num_micro_batches_;
  int64_t limit_;
  Early early_;
  int64_t num_units_ = 0;
  std::vector<Actions> lists_;  // of each rank
  std::vector<Order> orders_;
  std::vector<Actions> delayed_;   // by rank: all weight halves so far, in the order of computation
  std::vector<int64_t> num_held_;  // by rank: forwards whose weight half is not done
  std::vector<int64_t> num_begun_;     // by rank: forwards whose input half is not done
  std::vector<uint8_t> has_output_;    // by stage and micro-batch
  std::vector<uint8_t> has_gradient_;  // of the stage's input
};

}  // namespace

std::vector<Actions> pack_blocks(ScheduleKind kind, int64_t num_ranks, int64_t num_micro_batches) {
  const Block block = block_of(kind, num_ranks);
  // Each can be the fastest: a pass that is taken early may delay one that other ranks wait for.
  std::vector<Actions> best;
  int64_t least_units = std::numeric_limits<int64_t>::max();
  for (const Early early : {Early::kWhenIdle, Early::kBeforeWeightHalves, Early::kNever}) {
    Packing packing(block, num_ranks, num_micro_batches, early);
    std::vector<Actions> lists = packing.run();
    if (packing.num_units() < least_units) {
      least_units = packing.num_units();
      best = std::move(lists);
    }
  }
  return best;
}

}  // namespace weft::strategy::detail
