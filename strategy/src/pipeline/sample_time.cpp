#include "weft/strategy/pipeline/sample_time.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace weft::strategy {

namespace {

[[noreturn]] void throw_invalid(const std::string& text) {
  throw std::invalid_argument("tune: " + text);
}

void check_measurements(std::span<const int64_t> num_samples, std::span<const double> times) {
  if (num_samples.empty() || num_samples.size() != times.size()) {
    throw_invalid(std::to_string(times.size()) + " times of " + std::to_string(num_samples.size()) +
                  " sizes; pass one or more of each, as many times as sizes");
  }
  for (size_t i = 0; i < times.size(); ++i) {
    if (num_samples[i] < 1 || !std::isfinite(times[i]) || times[i] < 0) {
      throw_invalid("a time of " + std::to_string(times[i]) + " for " +
                    std::to_string(num_samples[i]) +
                    " samples; pass times from 0 on, for 1 sample or more");
    }
  }
}

}  // namespace

LinearTime fit_time(std::span<const int64_t> num_samples, std::span<const double> times) {
  check_measurements(num_samples, times);
  double mean_size = 0;
  double mean_time = 0;
  const auto count = static_cast<double>(times.size());
  for (size_t i = 0; i < times.size(); ++i) {
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
  if (fixed < 0) {  // the least-squares line through the origin
    return {.fixed = 0, .per_sample = time_squares / size_squares};
  }
  if (slope < 0) {
    return {.fixed = mean_time, .per_sample = 0};
  }
  return {.fixed = fixed, .per_sample = slope};
}

MeasuredTime::MeasuredTime(std::span<const int64_t> num_samples, std::span<const double> times) {
  check_measurements(num_samples, times);
  for (size_t i = 0; i < times.size(); ++i) {
    if (i > 0 && num_samples[i] <= num_samples[i - 1]) {
      throw_invalid("measured " + std::to_string(num_samples[i]) + " samples after " +
                    std::to_string(num_samples[i - 1]) + "; pass sizes in ascending order");
    }
    points_.emplace_back(static_cast<double>(num_samples[i]), times[i]);
  }
}

double MeasuredTime::at(double num_samples) const {
  const auto [smallest, shortest] = points_.front();
  if (points_.size() == 1) {
    return shortest * num_samples / smallest;
  }
  if (num_samples <= smallest) {
    return shortest;
  }
  auto above = std::find_if(points_.begin() + 1, points_.end() - 1, [&](const auto& point) {
    return point.first >= num_samples;
  });
  const auto [size, time] = *above;
  const auto [size_before, time_before] = *(above - 1);
  const double slope = (time - time_before) / (size - size_before);
  // A negative last slope comes from noise and must not be extrapolated.
  return num_samples > size ? time + std::max(slope, 0.0) * (num_samples - size)
                            : time_before + slope * (num_samples - size_before);
}

}  // namespace weft::strategy
