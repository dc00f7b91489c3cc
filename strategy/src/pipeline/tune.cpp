#include "weft/strategy/pipeline/tune.h"

#include "simulate_checked.h"
#include "weft/strategy/pipeline/micro_batches.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace weft::strategy {

namespace {

[[noreturn]] void throw_invalid(const std::string& text) {
  throw std::invalid_argument("tune: " + text);
}

// Returns the cost of each stage and micro-batch, stage by stage.
std::vector<StageCost> costs_of(std::span<const StageProfile> stages,
                                std::span<const int64_t> sizes) {
  std::vector<StageCost> costs;
  costs.reserve(stages.size() * sizes.size());
  for (const StageProfile& stage : stages) {
    for (const int64_t size : sizes) {
      const auto samples = static_cast<double>(size);
      const double bytes = static_cast<double>(stage.activation_bytes_per_sample) * samples;
      costs.push_back({.forward = time_at(stage.forward, samples),
                       .backward_input = time_at(stage.backward_input, samples),
                       .backward_weight = time_at(stage.backward_weight, samples),
                       .transfer = time_at(stage.transfer, samples),
                       .activation_bytes = static_cast<int64_t>(std::min(bytes, 4e18)),
                       .parameter_bytes = stage.parameter_bytes});
    }
  }
  return costs;
}

TunePoint point_of(const Schedule& schedule,
                   ScheduleKind kind,
                   std::span<const StageProfile> stages,
                   std::vector<int64_t> sizes,
                   const std::optional<int64_t>& memory_limit) {
  const Simulation simulation = detail::simulate_checked(schedule, costs_of(stages, sizes));
  const int64_t peak =
      *std::max_element(simulation.peak_bytes.begin(), simulation.peak_bytes.end());
  return {.kind = kind,
          .micro_batch_sizes = std::move(sizes),
          .makespan = simulation.makespan,
          .bubble_fraction = simulation.bubble_fraction,
          .peak_bytes = peak,
          .fits = !memory_limit || peak <= *memory_limit};
}

// Returns the key that orders points from the fastest to the slowest, those above the limit last.
auto ranking_key(const TunePoint& point) {
  return std::tuple(!point.fits, point.makespan, point.peak_bytes, point.micro_batch_sizes.size());
}

std::vector<ScheduleKind> kinds_for(int64_t stages_per_rank) {
  if (stages_per_rank == 2) {
    return {ScheduleKind::kNaive,
            ScheduleKind::kInterleaved,
            ScheduleKind::kLoopedBfs,
            ScheduleKind::kZeroBubbleV,
            ScheduleKind::kDualPipeV,
            ScheduleKind::kVHalf,
            ScheduleKind::kVMin};
  }
  if (stages_per_rank > 2) {
    return {ScheduleKind::kNaive, ScheduleKind::kInterleaved, ScheduleKind::kLoopedBfs};
  }
  return {ScheduleKind::kNaive,
          ScheduleKind::kGpipe,
          ScheduleKind::kOneForwardOneBackward,
          ScheduleKind::kZeroBubble};
}

// Returns the powers of two up to `most` and the numbers half-way between them.
std::vector<int64_t> default_counts(int64_t most) {
  std::vector<int64_t> result;
  for (int64_t n = 1;; n *= 2) {
    result.push_back(n);
    if (n > 1 && n / 2 <= most - n) {
      result.push_back(n + n / 2);
    }
    if (n > most / 2) {
      return result;
    }
  }
}

}  // namespace

std::vector<TunePoint> tune(std::span<const StageProfile> stages, const TuneOptions& options) {
  const auto num_stages = static_cast<int64_t>(stages.size());
  if (options.num_ranks < 1 || num_stages == 0 || num_stages % options.num_ranks != 0) {
    throw_invalid(std::to_string(num_stages) + " stages on " + std::to_string(options.num_ranks) +
                  " ranks; pass a multiple of the ranks, at least one stage for each");
  }
  if (options.batch_size < 1) {
    throw_invalid("batch_size is " + std::to_string(options.batch_size) + "; pass 1 or more");
  }
  const int64_t stages_per_rank = num_stages / options.num_ranks;
  const auto kinds = options.kinds.empty() ? kinds_for(stages_per_rank) : options.kinds;
  const auto counts = options.micro_batch_counts.empty() ? default_counts(options.batch_size)
                                                         : options.micro_batch_counts;
  std::vector<TunePoint> points;
  for (const int64_t count : counts) {
    if (count < 1 || count > options.batch_size) {
      throw_invalid(std::to_string(count) + " micro-batches of a batch of " +
                    std::to_string(options.batch_size) +
                    "; pass 1 to as many as there are samples");
    }
    const auto even =
        deal_samples(options.batch_size, std::vector<double>(static_cast<size_t>(count), 1.0));
    std::vector<std::vector<int64_t>> tapered;
    if (options.tapers && options.num_ranks > 1) {
      tapered = tapered_sizes(options.batch_size, count, options.num_ranks);
    }
    for (const ScheduleKind kind : kinds) {
      const Schedule schedule = generate(kind,
                                         {.num_ranks = options.num_ranks,
                                          .num_micro_batches = count,
                                          .stages_per_rank = stages_per_rank});
      const auto point_with = [&](const std::vector<int64_t>& sizes) {
        return point_of(schedule, kind, stages, sizes, options.memory_limit);
      };
      points.push_back(point_with(even));
      if (kind == ScheduleKind::kNaive) {  // does not overlap micro-batches: tapering gains nothing
        continue;
      }
      std::optional<TunePoint> best;
      for (const auto& sizes : tapered) {
        TunePoint point = point_with(sizes);
        if (!best || ranking_key(point) < ranking_key(*best)) {
          best = std::move(point);
        }
      }
      const TunePoint& even_point = points.back();
      // Tapering is faster by more than rounding, or only it is within the memory limit.
      if (best && std::tuple(!best->fits, best->makespan) <
                      std::tuple(!even_point.fits, even_point.makespan * (1 - 1e-6))) {
        points.push_back(*std::move(best));
      }
    }
  }
  std::stable_sort(points.begin(), points.end(), [](const TunePoint& a, const TunePoint& b) {
    return ranking_key(a) < ranking_key(b);
  });
  return points;
}

}  // namespace weft::strategy
