#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace weft::strategy {

// A time that is linear in the samples of a micro-batch: fixed + per_sample * samples.
struct LinearTime {
  double fixed = 0;
  double per_sample = 0;

  [[nodiscard]] double at(double num_samples) const { return fixed + per_sample * num_samples; }
};

// Fits a line to measured times by least squares, with neither coefficient below 0. With one
// measurement, or several at one size, the time is proportional to the samples.
// Throws std::invalid_argument without measurements, for sizes below 1 and for negative times.
LinearTime fit_time(std::span<const int64_t> num_samples, std::span<const double> times);

// Interpolates measured times, which are not linear because of caches. Times are linear between the
// measured sizes. Above the largest size they continue with the slope between the last two, or are
// constant if that slope is negative. Below the smallest size, the time is that of the smallest.
// With one measured size, the time is proportional to the samples.
class MeasuredTime {
 public:
  // Throws std::invalid_argument if fit_time would, and for sizes that do not ascend.
  MeasuredTime(std::span<const int64_t> num_samples, std::span<const double> times);

  [[nodiscard]] double at(double num_samples) const;

 private:
  std::vector<std::pair<double, double>> points_;
};

using SampleTime = std::variant<LinearTime, MeasuredTime>;

inline double time_at(const SampleTime& time, double num_samples) {
  return std::visit([&](const auto& each) { return each.at(num_samples); }, time);
}

}  // namespace weft::strategy
