#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace weft::strategy {

// A time that grows with the samples of a micro-batch: fixed + per_sample * samples.
struct LinearTime {
  double fixed = 0;
  double per_sample = 0;

  [[nodiscard]] double at(double num_samples) const { return fixed + per_sample * num_samples; }
};

// The line through measured times, by least squares, neither part below 0. With one measurement,
// or several at one size, all time is per sample.
// Throws std::invalid_argument without any, for sizes below 1 and for times that are negative.
LinearTime fit_time(std::span<const int64_t> num_samples, std::span<const double> times);

// Times as they were measured, which caches bend: straight between the sizes, beyond the largest on
// as between the last two. Fewer samples than were measured are not claimed to take less
// time. With one measured size, time is in proportion.
class MeasuredTime {
 public:
  // Throws std::invalid_argument as fit_time does, and for sizes that do not ascend.
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
