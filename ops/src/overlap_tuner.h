#pragma once

// The measurement behind WEFT_OVERLAP=auto: see <weft/ops/overlap.h>.

#include "stopwatch.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace weft::ops {

// Times chunked and unchunked calls of one kind of shape and compares their medians.
//
// Calls come in pairs: one chunked, one unchunked, in random order, so that a periodic pattern in
// the caller's layers does not bias the comparison. All ranks use the same random sequence, because
// chunked and unchunked calls issue different collectives. Samples are grouped by the size of this
// rank's weight (own_features). The first pair is a warm-up.
class OverlapTuner {
 public:
  bool next_is_chunked() {
    const auto call = num_calls_++;
    if (call % 2 == 0) first_is_chunked_ = (random_() & 1) != 0;
    return first_is_chunked_ == (call % 2 == 0);
  }
  // Whether the call of the last next_is_chunked() comes after the warm-up.
  bool is_warm() const { return num_calls_ > kNumWarmUps; }
  // Whether the ranks must exchange results before the next next_is_chunked().
  bool must_exchange() const { return num_calls_ == kNumWarmUps + num_to_time_; }
  // After the exchange: if a rank lacks samples and the limit is not reached, doubles the number of
  // calls to time and returns true.
  bool extend_timing(bool any_rank_lacks_samples) {
    if (!any_rank_lacks_samples || num_to_time_ >= kMaxTimed) return false;
    num_to_time_ *= 2;
    return true;
  }

  // A call that has returned; the device may still be executing it.
  struct TimedCall {
    std::int64_t own_features;
    bool is_chunked;
    std::int64_t num_rows;
    std::unique_ptr<Stopwatch> watch;
  };
  void add(TimedCall timed) { timed_.push_back(std::move(timed)); }
  std::vector<TimedCall> take_timed() { return std::exchange(timed_, {}); }

  void record(std::int64_t own_features, bool is_chunked, double seconds_per_row) {
    times_[own_features].at(is_chunked ? 1 : 0).push_back(seconds_per_row);
  }

  bool lacks_samples() const {
    return std::ranges::any_of(times_,
                               [](const auto& each) { return !has_enough_samples(each.second); });
  }

  // Largest ratio of chunked to unchunked time over the weight sizes with enough samples; infinity
  // without any.
  double worst_ratio() const {
    double worst = 0;
    for (const auto& [own_features, times] : times_) {
      if (has_enough_samples(times)) {
        worst = std::max(worst, median(times[1]) / median(times[0]));
      }
    }
    return worst > 0 ? worst : std::numeric_limits<double>::infinity();
  }

 private:
  // The ranks exchange results after 32 timed calls, 64, 128 and so on, until every weight size has
  // kMinSamples of both variants on every rank. After 512 timed calls they decide with the samples
  // that exist.
  static constexpr int kNumWarmUps = 2;
  static constexpr int kNumTimed = 32;
  static constexpr int kMaxTimed = 512;
  static constexpr std::size_t kMinSamples = 4;

  using Times = std::array<std::vector<double>, 2>;  // unchunked, chunked

  static bool has_enough_samples(const Times& times) {
    return std::min(times[0].size(), times[1].size()) >= kMinSamples;
  }

  static double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  std::minstd_rand random_;
  bool first_is_chunked_ = false;
  int num_calls_ = 0;
  int num_to_time_ = kNumTimed;
  std::vector<TimedCall> timed_;
  std::map<std::int64_t, Times> times_;
};

}  // namespace weft::ops
