#include "weft/strategy/pipeline/tune.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>

namespace weft::strategy {

namespace {

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument("tune: " + text); }

// Times are those of the mean micro-batch, bytes those of the largest.
std::vector<StageCost> costs_at(std::span<const StageProfile> stages,
                                double num_samples,
                                double most_samples) {
  std::vector<StageCost> costs;
  costs.reserve(stages.size());
  for (const StageProfile& stage : stages) {
    const auto bytes = static_cast<double>(stage.activation_bytes_per_sample) * most_samples;
    costs.push_back({.forward = stage.forward.at(num_samples),
                     .backward_input = stage.backward_input.at(num_samples),
                     .backward_weight = stage.backward_weight.at(num_samples),
                     .transfer = stage.transfer.at(num_samples),
                     .activation_bytes = static_cast<int64_t>(std::min(bytes, 4e18)),
                     .parameter_bytes = stage.parameter_bytes});
  }
  return costs;
}

std::vector<ScheduleKind> kinds_for(int64_t stages_per_rank) {
  if (stages_per_rank > 1) {
    return {ScheduleKind::kNaive, ScheduleKind::kInterleaved, ScheduleKind::kLoopedBfs};
  }
  return {ScheduleKind::kNaive,
          ScheduleKind::kGpipe,
          ScheduleKind::kOneForwardOneBackward,
          ScheduleKind::kZeroBubble};
}

std::vector<int64_t> powers_of_two(int64_t most) {
  std::vector<int64_t> result;
  for (int64_t n = 1; n <= most; n *= 2) {
    result.push_back(n);
    if (n > most / 2) {
      break;
    }
  }
  return result;
}

}  // namespace

LinearTime fit_time(std::span<const int64_t> num_samples, std::span<const double> times) {
  if (num_samples.empty() || num_samples.size() != times.size()) {
    refuse(std::to_string(times.size()) + " times of " + std::to_string(num_samples.size()) +
           " sizes; pass one or more of each, as many times as sizes");
  }
  double mean_size = 0;
  double mean_time = 0;
  const auto count = static_cast<double>(times.size());
  for (size_t i = 0; i < times.size(); ++i) {
    if (num_samples[i] < 1 || !std::isfinite(times[i]) || times[i] < 0) {
      refuse("a time of " + std::to_string(times[i]) + " for " + std::to_string(num_samples[i]) +
             " samples; pass times from 0 on, for 1 sample or more");
    }
    mean_size += static_cast<double>(num_samples[i]) / count;
    mean_time += times[i] / count;
  }
  double covariance = 0;
  double variance = 0;
  double time_squares = 0;
  double size_squares = 0;
  for (size_t i = 0; i < times.size(); ++i) {
    const auto size = static_cast<double>(num_samples[i]);
    covariance += (size - mean_size) * (times[i] - mean_time);
    variance += (size - mean_size) * (size - mean_size);
    time_squares += size * times[i];
    size_squares += size * size;
  }
  if (variance == 0) {
    return {.fixed = 0, .per_sample = mean_time / mean_size};
  }
  const double slope = covariance / variance;
  const double fixed = mean_time - slope * mean_size;
  if (fixed < 0) {  // the best line through the origin
    return {.fixed = 0, .per_sample = time_squares / size_squares};
  }
  if (slope < 0) {
    return {.fixed = mean_time, .per_sample = 0};
  }
  return {.fixed = fixed, .per_sample = slope};
}

std::vector<TunePoint> tune(std::span<const StageProfile> stages, const TuneOptions& options) {
  const auto num_stages = static_cast<int64_t>(stages.size());
  if (options.num_ranks < 1 || num_stages == 0 || num_stages % options.num_ranks != 0) {
    refuse(std::to_string(num_stages) + " stages on " + std::to_string(options.num_ranks) +
           " ranks; pass a multiple of the ranks, at least one stage for each");
  }
  if (options.batch_size < 1) {
    refuse("batch_size is " + std::to_string(options.batch_size) + "; pass 1 or more");
  }
  const int64_t stages_per_rank = num_stages / options.num_ranks;
  const auto kinds = options.kinds.empty() ? kinds_for(stages_per_rank) : options.kinds;
  const auto counts = options.micro_batch_counts.empty() ? powers_of_two(options.batch_size)
                                                         : options.micro_batch_counts;
  std::vector<TunePoint> points;
  for (const int64_t count : counts) {
    if (count < 1 || count > options.batch_size) {
      refuse(std::to_string(count) + " micro-batches of a batch of " +
             std::to_string(options.batch_size) + "; pass 1 to as many as there are samples");
    }
    const double mean = static_cast<double>(options.batch_size) / static_cast<double>(count);
    const auto costs = costs_at(stages, mean, std::ceil(mean));
    for (const ScheduleKind kind : kinds) {
      const Schedule schedule = generate(kind,
                                         {.num_ranks = options.num_ranks,
                                          .num_micro_batches = count,
                                          .stages_per_rank = stages_per_rank});
      const Simulation simulation = simulate(schedule, costs);
      const int64_t peak =
          *std::max_element(simulation.peak_bytes.begin(), simulation.peak_bytes.end());
      points.push_back({.kind = kind,
                        .num_micro_batches = count,
                        .makespan = simulation.makespan,
                        .bubble_fraction = simulation.bubble_fraction,
                        .peak_bytes = peak,
                        .fits = !options.memory_limit || peak <= *options.memory_limit});
    }
  }
  const auto key = [](const TunePoint& point) {
    return std::tuple(!point.fits, point.makespan, point.peak_bytes, point.num_micro_batches);
  };
  std::stable_sort(points.begin(), points.end(), [&](const TunePoint& a, const TunePoint& b) {
    return key(a) < key(b);
  });
  return points;
}

}  // namespace weft::strategy
