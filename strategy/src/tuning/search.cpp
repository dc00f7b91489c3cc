#include "weft/strategy/tuning/search.h"

#include "../memory/check_training.h"
#include "candidates.h"
#include "least_bytes.h"
#include "variants.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace weft::strategy {

namespace {

using detail::Candidate;
using detail::Candidates;
using detail::candidates_of;
using detail::HostMemory;
using detail::LeastBytes;
using detail::most_blocks;
using detail::offload_options_of;
using detail::predict_times;
using detail::step_options_of;
using detail::Variant;
using detail::variants_of;

// The candidates, the fastest first; and of equal ones, the first that was added.
class Queue {
 public:
  explicit Queue(std::vector<Candidate> candidates) : candidates_(std::move(candidates)) {
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      push(i);
    }
  }

  [[nodiscard]] bool empty() const { return order_.empty(); }
  // Removes the first one, and returns its index.
  std::size_t pop() {
    const std::size_t idx = order_.top().second;
    order_.pop();
    return idx;
  }
  void push(std::size_t idx) { order_.emplace(candidates_[idx].least_seconds, idx); }
  Candidate& operator[](std::size_t idx) { return candidates_[idx]; }

 private:
  using Entry = std::pair<double, std::size_t>;
  std::vector<Candidate> candidates_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> order_;
};

// Returns the largest usage of a rank; or, if it is above `enough`, that of any rank above it.
MemoryUsage largest_usage(const TrainingSpec& training, int64_t enough) {
  MemoryUsage largest;
  for (const RankClass& each : distinct_ranks(training)) {
    for (const PhaseMemory& phase : predict_memory(training, each.global_rank)) {
      if (phase.at_peak.total() > largest.total()) {
        largest = phase.at_peak;
      }
    }
    if (largest.total() > enough) {
      break;
    }
  }
  return largest;
}

void check(const LayoutSearch& search) {
  for (const auto& [name, number] :
       {std::pair<std::string, int64_t>{"num_devices", search.num_devices},
        {"global_sequences", search.global_sequences},
        {"memory_limit", search.memory_limit},
        {"max_results", search.max_results}}) {
    if (number < 1) {
      throw std::invalid_argument("tune: got " + name + " = " + std::to_string(number) +
                                  "; give a number from 1");
    }
  }
  if (search.zero_stages.empty() || search.checkpointing.empty() ||
      search.steps_in_backward.empty() || search.sequence_parallel.empty() ||
      search.offloads_states.empty()) {
    throw std::invalid_argument(
        "tune: got no values for the ZeRO stage, checkpointing, steps in the backward, sequence "
        "parallelism or offload; give at least one of each");
  }
  if (offload_options_of(search) == std::vector<bool>{true}) {
    detail::check_offload(search.training);
    check_hosts(search.cluster);
  }
  if (step_options_of(search).empty()) {
    throw std::invalid_argument(
        "tune: Adagrad does not step inside the backward; use SGD, Adam or AdamW, or step after "
        "it");
  }
}

[[noreturn]] void refuse(const LayoutSearch& search, const Candidates& found) {
  if (!found.has_valid_tensor_size && !found.rejections.empty()) {
    throw std::invalid_argument("tune: no layout of " + std::to_string(search.num_devices) +
                                " devices is valid: " + found.rejections.front().reason);
  }
  throw std::invalid_argument(
      "tune: got " + std::to_string(search.num_devices) + " devices and " +
      std::to_string(search.global_sequences) +
      " sequences for a step, which no layout divides with the sizes that are fixed; give a "
      "multiple of the data-parallel ranks, or fix other sizes (a pipeline has at most as many "
      "ranks as the model has blocks, and accumulates nothing)");
}

Candidates checked_candidates_of(const LayoutSearch& search) {
  check(search);
  Candidates found = candidates_of(search);
  if (found.candidates.empty()) {
    refuse(search, found);
  }
  return found;
}

class Search {
 public:
  explicit Search(const LayoutSearch& search)
      : search_(search),
        found_(checked_candidates_of(search)),
        least_bytes_(search),
        host_memory_(search.cluster) {}

  LayoutSearchResult run() {
    LayoutSearchResult result;
    result.rejections = std::move(found_.rejections);
    result.num_candidates = std::count_if(found_.candidates.begin(),
                                          found_.candidates.end(),
                                          [](const auto& each) { return !each.has_open_blocks; });
    Queue queue(std::move(found_.candidates));
    while (!queue.empty() && std::cmp_less(result.layouts.size(), search_.max_results)) {
      const std::size_t idx = queue.pop();
      Candidate& candidate = queue[idx];
      if (candidate.chosen) {
        result.layouts.push_back(std::move(*candidate.chosen));
        continue;
      }
      const int64_t bound = least_bytes_.of(candidate);
      if (candidate.has_open_blocks) {
        if (bound <= search_.memory_limit && close_blocks(candidate)) {
          queue.push(idx);
        }
        continue;
      }
      if (!candidate.is_simulated && may_matter(bound)) {
        predict_times(candidate, found_.cache, true);
        queue.push(idx);
        continue;
      }
      candidate.chosen = first_that_fits(candidate);
      if (!candidate.chosen) {
        ++result.num_above_limit;
      } else if (candidate.chosen->time.total() > candidate.least_seconds) {
        candidate.least_seconds = candidate.chosen->time.total();
        queue.push(idx);
      } else {
        result.layouts.push_back(std::move(*candidate.chosen));
      }
    }
    if (!has_fit_) {
      refuse_without_smallest();
      result.smallest = std::move(smallest_);
    }
    return result;
  }

  std::vector<FoundLayout> front() {
    std::vector<FoundLayout> front;
    int64_t least = kMost;
    Queue queue(with_one_time_each());
    while (!queue.empty()) {
      const std::size_t idx = queue.pop();
      Candidate& candidate = queue[idx];
      if (least_bytes_.of(candidate) >= least) {
        continue;
      }
      if (!candidate.is_simulated) {
        predict_times(candidate, found_.cache, true);
        queue.push(idx);
        continue;
      }
      for (const Variant& variant : variants_of(candidate, found_.cache)) {
        if (!host_memory_.fits(variant.training)) {
          continue;
        }
        const MemoryUsage usage = largest_usage(variant.training, least);
        if (usage.total() >= least) {
          continue;
        }
        least = usage.total();
        if (!front.empty() && front.back().time.total() == candidate.time.total()) {
          front.pop_back();  // as fast, with more bytes
        }
        front.push_back({.training = variant.training, .time = candidate.time, .at_peak = usage});
      }
    }
    return front;
  }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

  // Returns the bytes below which a variant is the smallest so far, if that matters.
  [[nodiscard]] int64_t least_so_far() const {
    return has_fit_ ? 0 : smallest_ ? smallest_->at_peak.total() : kMost;
  }
  // Returns whether a variant with at least so many bytes may fit or be the smallest.
  [[nodiscard]] bool may_matter(int64_t bound) const {
    return bound <= search_.memory_limit || bound < least_so_far();
  }

  // Returns the first variant of a candidate that fits, with its time and its memory. Keeps the
  // smallest one as long as none fits.
  std::optional<FoundLayout> first_that_fits(const Candidate& candidate) {
    const std::vector<Variant> variants = variants_of(candidate, found_.cache);
    bool exceeds_in_backward = false;
    for (const Variant& variant : variants) {
      const TrainingSpec& training = variant.training;
      const bool exceeds = exceeds_in_backward && !training.steps_in_backward;
      if (exceeds || !may_matter(least_bytes_.of(training, training.offloads_states)) ||
          !host_memory_.fits(training)) {
        continue;
      }
      const int64_t enough = std::max(search_.memory_limit, least_so_far());
      const MemoryUsage usage = largest_usage(training, enough);
      const bool fits = usage.total() <= search_.memory_limit;
      // With offload, steps after the backward are slower, and need no less memory.
      exceeds_in_backward = training.offloads_states && training.steps_in_backward && !fits;
      if (!fits && usage.total() >= least_so_far()) {
        continue;
      }
      const bool has_time = &variant == &variants.front() || !training.offloads_states;
      FoundLayout layout = {
          .training = training,
          .time = has_time ? candidate.time : detail::step_time(training, found_.cache, true),
          .at_peak = usage};
      if (fits) {
        has_fit_ = true;
        return layout;
      }
      smallest_ = std::move(layout);
    }
    return std::nullopt;
  }

  [[nodiscard]] bool fits(TrainingSpec training, int64_t blocks) const {
    training.checkpointing = blocks == 0 ? Checkpointing::kNone : Checkpointing::kFull;
    training.checkpointed_blocks = blocks == 0 ? std::nullopt : std::optional(blocks);
    return largest_usage(training, search_.memory_limit).total() <= search_.memory_limit;
  }

  // Returns the least number of blocks with checkpoints with which a training fits; nullopt if it
  // does not fit with those of all blocks but one.
  [[nodiscard]] std::optional<int64_t> least_blocks(const TrainingSpec& training) const {
    int64_t least = most_blocks(training) - 1;
    if (!fits(training, least)) {
      return std::nullopt;
    }
    int64_t too_few = 0;
    while (too_few + 1 < least) {
      const int64_t middle = (too_few + least) / 2;
      (fits(training, middle) ? least : too_few) = middle;
    }
    return least;
  }

  // Sets the least number of blocks with checkpoints that fit and its variant: the first without
  // offload, or else the fastest with it. Returns false if a variant fits without checkpoints, or
  // none with those of all blocks but one.
  bool close_blocks(Candidate& candidate) {
    std::optional<Candidate> fastest;
    for (const bool offloads : candidate.offloads_states) {
      Candidate closed = candidate;
      closed.has_open_blocks = false;
      closed.offloads_states = {offloads};
      TrainingSpec& training = closed.training;
      training.offloads_states = offloads;
      if (least_bytes_.of(training, offloads) > search_.memory_limit ||
          !host_memory_.fits(training)) {
        continue;
      }
      for (const bool in_backward : candidate.steps_in_backward) {
        training.steps_in_backward = in_backward;
        if (fits(training, 0)) {
          return false;
        }
      }
      for (const bool in_backward : candidate.steps_in_backward) {
        if (fastest && !offloads) {
          break;
        }
        training.steps_in_backward = in_backward;
        if (const std::optional<int64_t> blocks = least_blocks(training)) {
          training.checkpointed_blocks = blocks;
          closed.steps_in_backward = {in_backward};
          predict_times(closed, found_.cache, false);
          if (!fastest || closed.least_seconds < fastest->least_seconds) {
            fastest = closed;
          }
        }
      }
      if (fastest) {
        candidate = *std::move(fastest);
        return true;
      }
    }
    return false;
  }

  // Returns the candidates of the front, each variant with a time of its own as one.
  std::vector<Candidate> with_one_time_each() {
    std::vector<Candidate> candidates;
    for (const Candidate& candidate : found_.candidates) {
      if (candidate.has_open_blocks) {
        continue;
      }
      for (const bool offloads : candidate.offloads_states) {
        Candidate variant = candidate;
        variant.offloads_states = {offloads};
        for (const bool in_backward : candidate.steps_in_backward) {
          if (offloads) {
            variant.steps_in_backward = {in_backward};
          } else if (in_backward != candidate.steps_in_backward.front()) {
            continue;  // as fast as the first
          }
          predict_times(variant, found_.cache, false);
          candidates.push_back(variant);
        }
      }
    }
    return candidates;
  }

  // Throws if there is no variant of which the memory on the device is known.
  void refuse_without_smallest() const {
    if (!smallest_) {
      throw std::invalid_argument(
          "tune: got offloaded optimizer states, which take more than the " +
          std::to_string(search_.cluster.host_bytes) +
          " bytes of CPU memory of a host in each layout; use more hosts or int8 states, or leave "
          "offload out");
    }
  }

  const LayoutSearch& search_;
  Candidates found_;
  LeastBytes least_bytes_;
  HostMemory host_memory_;
  bool has_fit_ = false;
  std::optional<FoundLayout> smallest_;  // while no variant fits
};

}  // namespace

LayoutSearchResult search_layouts(const LayoutSearch& search) { return Search(search).run(); }

std::vector<FoundLayout> search_front(const LayoutSearch& search) { return Search(search).front(); }

}  // namespace weft::strategy
