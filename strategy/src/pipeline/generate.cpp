// Every rank's list interleaves two sequences, its forwards and its backwards. All ranks have the
// same order within a sequence, so that a rank's n-th send is its neighbour's n-th receive. The
// V-shaped kinds are in pack_blocks.cpp and dual_pipe_v.cpp.

#include "weft/strategy/pipeline/generate.h"

#include "../text.h"
#include "v_schedules.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace weft::strategy {

namespace {

using Actions = std::vector<Action>;

// Indexed by the enumerator.
constexpr std::array<std::string_view, 10> kKindNames = {"naive",
                                                         "gpipe",
                                                         "1f1b",
                                                         "interleaved",
                                                         "zero_bubble",
                                                         "looped_bfs",
                                                         "zbv",
                                                         "dualpipev",
                                                         "v_half",
                                                         "v_min"};
constexpr std::array<ScheduleKind, 10> kAllKinds = {ScheduleKind::kNaive,
                                                    ScheduleKind::kGpipe,
                                                    ScheduleKind::kOneForwardOneBackward,
                                                    ScheduleKind::kInterleaved,
                                                    ScheduleKind::kZeroBubble,
                                                    ScheduleKind::kLoopedBfs,
                                                    ScheduleKind::kZeroBubbleV,
                                                    ScheduleKind::kDualPipeV,
                                                    ScheduleKind::kVHalf,
                                                    ScheduleKind::kVMin};

// A rank's forwards and backwards, each in its order.
struct Sequences {
  Actions forwards;
  Actions backwards;
};

// Micro-batches pass through a rank's stages in rounds of `round_size`: all of a round through the
// first stage, then through the second, ... The backwards visit the stages in reverse order.
Sequences make_sequences(const GenerateOptions& options, int64_t rank, int64_t round_size) {
  Sequences result;
  const int64_t num_actions = options.stages_per_rank * options.num_micro_batches;
  result.forwards.reserve(static_cast<size_t>(num_actions));
  result.backwards.reserve(static_cast<size_t>(num_actions));
  for (int64_t begin = 0; begin < options.num_micro_batches; begin += round_size) {
    const int64_t end = std::min(begin + round_size, options.num_micro_batches);
    for (int64_t model_chunk = 0; model_chunk < options.stages_per_rank; ++model_chunk) {
      const auto first = static_cast<int32_t>(model_chunk * options.num_ranks + rank);
      const auto last = static_cast<int32_t>(
          (options.stages_per_rank - 1 - model_chunk) * options.num_ranks + rank);
      for (auto i = static_cast<int32_t>(begin); i < end; ++i) {
        result.forwards.push_back({first, i, ActionKind::kForward});
        result.backwards.push_back({last, i, ActionKind::kBackward});
      }
    }
  }
  return result;
}

// Returns all forwards of a round, then its backwards, then the next round.
Actions alternate_rounds(const Sequences& sequences, int64_t round_size, int64_t stages_per_rank) {
  Actions result;
  result.reserve(2 * sequences.forwards.size());
  const auto step = static_cast<size_t>(round_size * stages_per_rank);
  for (size_t begin = 0; begin < sequences.forwards.size(); begin += step) {
    const size_t end = std::min(begin + step, sequences.forwards.size());
    for (const Actions* actions : {&sequences.forwards, &sequences.backwards}) {
      result.insert(result.end(),
                    actions->begin() + static_cast<ptrdiff_t>(begin),
                    actions->begin() + static_cast<ptrdiff_t>(end));
    }
  }
  return result;
}

// `warm_up` forwards, then alternating backwards and forwards (the steady state), then the
// remaining backwards.
Actions one_forward_one_backward(const Sequences& sequences, int64_t warm_up) {
  Actions result;
  result.reserve(2 * sequences.forwards.size());
  const size_t count = sequences.forwards.size();
  size_t forward = std::min(count, static_cast<size_t>(warm_up));
  result.insert(result.end(),
                sequences.forwards.begin(),
                sequences.forwards.begin() + static_cast<ptrdiff_t>(forward));
  for (const Action& backward : sequences.backwards) {
    result.push_back(backward);
    if (forward < count) {
      result.push_back(sequences.forwards[forward++]);
    }
  }
  return result;
}

// ZB-H1: splits the backwards of a 1F1B list and delays the weight halves to fill the bubble. A
// weight half is added before a forward that would put more than `num_ranks` micro-batches in
// flight and, after the last forward, after each input half; the remaining ones are added at the
// end.
Actions split_backwards(const Actions& one_f_one_b, int64_t num_ranks) {
  Actions result;
  result.reserve(one_f_one_b.size() / 2 * 3);
  Actions delayed;  // weight halves, the first `next` of which are in `result`
  size_t next = 0;
  int64_t in_flight = 0;
  auto num_forwards = static_cast<int64_t>(one_f_one_b.size() / 2);
  const auto add_weight_half = [&] {
    result.push_back(delayed[next++]);
    --in_flight;
  };
  for (const Action& action : one_f_one_b) {
    if (action.kind == ActionKind::kForward) {
      while (in_flight >= num_ranks) {
        add_weight_half();
      }
      result.push_back(action);
      ++in_flight;
      --num_forwards;
      continue;
    }
    result.push_back({action.stage, action.micro_batch, ActionKind::kBackwardInput});
    delayed.push_back({action.stage, action.micro_batch, ActionKind::kBackwardWeight});
    if (num_forwards == 0) {
      add_weight_half();
    }
  }
  while (next < delayed.size()) {
    add_weight_half();
  }
  return result;
}

// The order of Narayanan et al. 2021, which needs full rounds of one micro-batch per rank. A rank's
// warm-up has two more forwards for each rank after it, because a micro-batch passes through these
// ranks forward and backward. A short last round has the order of a full one, without the missing
// micro-batches. (An order made for the short round deadlocks: forwards wait for backwards, and
// these for the forwards.)
Actions interleave(GenerateOptions options, int64_t rank) {
  const int64_t p = options.num_ranks;
  const int64_t m = options.num_micro_batches;
  const int64_t v = options.stages_per_rank;
  options.num_micro_batches = (m + p - 1) / p * p;
  Actions result = one_forward_one_backward(
      make_sequences(options, rank, p), v == 1 ? p - rank : 2 * (p - 1 - rank) + (v - 1) * p + 1);
  std::erase_if(result, [&](const Action& action) { return action.micro_batch >= m; });
  return result;
}

Actions actions_of(ScheduleKind kind, const GenerateOptions& options, int64_t rank) {
  const int64_t p = options.num_ranks;
  const int64_t v = options.stages_per_rank;
  const int64_t m = options.num_micro_batches;
  switch (kind) {
    case ScheduleKind::kNaive:
      return alternate_rounds(make_sequences(options, rank, 1), 1, v);
    case ScheduleKind::kGpipe:
    case ScheduleKind::kLoopedBfs:
      return alternate_rounds(make_sequences(options, rank, m), m, v);
    case ScheduleKind::kOneForwardOneBackward:
      return one_forward_one_backward(make_sequences(options, rank, m), p - rank);
    case ScheduleKind::kInterleaved:
      return interleave(options, rank);
    case ScheduleKind::kZeroBubble:
      return split_backwards(one_forward_one_backward(make_sequences(options, rank, m), p - rank),
                             p);
    default:  // V-shaped
      break;
  }
  throw std::logic_error("generate: a schedule kind without a case");
}

void check_options(ScheduleKind kind, const GenerateOptions& options) {
  const std::array<std::pair<std::string_view, int64_t>, 3> counts = {
      {{"num_ranks", options.num_ranks},
       {"num_micro_batches", options.num_micro_batches},
       {"stages_per_rank", options.stages_per_rank}}};
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / 2;
  for (const auto& [name, count] : counts) {
    if (count < 1 || count > kMax) {
      throw std::invalid_argument("schedule " + detail::quote(to_string(kind)) + ": " +
                                  std::string(name) + " is " + std::to_string(count) +
                                  "; pass a number from 1 to " + std::to_string(kMax));
    }
  }
  if (supports_stages_per_rank(kind, options.stages_per_rank)) {
    return;
  }
  const std::string got = std::to_string(options.stages_per_rank);
  throw std::invalid_argument("schedule " + detail::quote(to_string(kind)) +
                              (is_v_shaped(kind) ? " has two stages on each rank and got " + got +
                                                       "; cut the model into two stages for each "
                                                       "rank (stages_per_rank=2), or use '1f1b' or "
                                                       "'interleaved'"
                                                 : " has one stage on each rank and got " + got +
                                                       "; use 'interleaved' or 'looped_bfs'"));
}

}  // namespace

std::string_view to_string(ScheduleKind kind) { return kKindNames.at(static_cast<size_t>(kind)); }

ScheduleKind parse_schedule_kind(std::string_view text) {
  const auto found = std::find(kKindNames.begin(), kKindNames.end(), text);
  if (found == kKindNames.end()) {
    throw std::invalid_argument(
        "unknown schedule " + detail::quote(text) + ": use one of " +
        detail::join(std::vector<std::string>(kKindNames.begin(), kKindNames.end()), ", ") +
        "; the nearest is " + detail::quote(detail::nearest(text, kKindNames)));
  }
  return static_cast<ScheduleKind>(found - kKindNames.begin());
}

std::span<const ScheduleKind> all_schedule_kinds() { return kAllKinds; }

bool is_v_shaped(ScheduleKind kind) {
  return kind == ScheduleKind::kZeroBubbleV || kind == ScheduleKind::kDualPipeV ||
         kind == ScheduleKind::kVHalf || kind == ScheduleKind::kVMin;
}

bool splits_backwards(ScheduleKind kind) {
  return kind == ScheduleKind::kZeroBubble || is_v_shaped(kind);
}

int64_t default_stages_per_rank(ScheduleKind kind) {
  return kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kLoopedBfs || is_v_shaped(kind)
             ? 2
             : 1;
}

bool supports_stages_per_rank(ScheduleKind kind, int64_t stages_per_rank) {
  if (is_v_shaped(kind)) {
    return stages_per_rank == 2;
  }
  const bool has_one =
      kind == ScheduleKind::kOneForwardOneBackward || kind == ScheduleKind::kZeroBubble;
  return stages_per_rank == 1 || !has_one;
}

std::vector<int32_t> place_stages(ScheduleKind kind, int64_t num_ranks, int64_t stages_per_rank) {
  std::vector<int32_t> ranks;
  ranks.reserve(static_cast<size_t>(num_ranks * stages_per_rank));
  for (int64_t stage = 0; stage < num_ranks * stages_per_rank; ++stage) {
    const bool goes_up = is_v_shaped(kind) && stage >= num_ranks;
    ranks.push_back(static_cast<int32_t>(goes_up ? 2 * num_ranks - 1 - stage : stage % num_ranks));
  }
  return ranks;
}

Schedule generate(ScheduleKind kind, const GenerateOptions& options) {
  check_options(kind, options);
  if (kind == ScheduleKind::kDualPipeV) {
    return Schedule(detail::generate_dual_pipe_v(options.num_ranks, options.num_micro_batches));
  }
  if (is_v_shaped(kind)) {
    return Schedule(detail::pack_blocks(kind, options.num_ranks, options.num_micro_batches));
  }
  std::vector<Actions> ranks;
  ranks.reserve(static_cast<size_t>(options.num_ranks));
  for (int64_t rank = 0; rank < options.num_ranks; ++rank) {
    ranks.push_back(actions_of(kind, options, rank));
  }
  return Schedule(std::move(ranks));
}

}  // namespace weft::strategy
