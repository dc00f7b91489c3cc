#include "stopwatch.h"

#include <atomic>
#include <chrono>

namespace weft::ops {

namespace {

class CpuStopwatch final : public Stopwatch {
 public:
  void stop() override { elapsed_ = Clock::now() - start_; }
  double seconds() const override { return elapsed_.count(); }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start_ = Clock::now();
  std::chrono::duration<double> elapsed_{};
};

std::atomic<bool (*)(const c10::Device&)> can_time_on_cuda{nullptr};
std::atomic<std::unique_ptr<Stopwatch> (*)(const c10::Device&)> start_on_cuda{nullptr};

}  // namespace

bool can_time(const c10::Device& device) {
  if (device.is_cpu()) {
    return true;
  }
  const auto can = can_time_on_cuda.load();
  return device.is_cuda() && can != nullptr && can(device);
}

std::unique_ptr<Stopwatch> start_stopwatch(const c10::Device& device) {
  if (device.is_cpu()) {
    return std::make_unique<CpuStopwatch>();
  }
  return start_on_cuda.load()(device);
}

void set_cuda_stopwatch(const StopwatchMaker& maker) {
  start_on_cuda = maker.start;
  can_time_on_cuda = maker.can_time;
}

}  // namespace weft::ops
