#include "stopwatch.h"

#include <atomic>
#include <chrono>

namespace weft::ops {

namespace {

class CpuStopwatch final : public Stopwatch {
 public:
  void stop() override { taken_ = Clock::now() - start_; }
  double seconds() const override { return taken_.count(); }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start_ = Clock::now();
  std::chrono::duration<double> taken_{};
};

std::atomic<StartStopwatch> start_on_cuda{nullptr};

}  // namespace

std::unique_ptr<Stopwatch> start_stopwatch(const c10::Device& device) {
  if (device.is_cpu()) {
    return std::make_unique<CpuStopwatch>();
  }
  const auto start = start_on_cuda.load();
  return device.is_cuda() && start != nullptr ? start(device) : nullptr;
}

void set_cuda_stopwatch(StartStopwatch start) { start_on_cuda = start; }

}  // namespace weft::ops
