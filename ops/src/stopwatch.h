#pragma once

// Times the work that is submitted to a device between start and stop.

#include <weft/ops/export.h>

#include <c10/core/Device.h>

#include <memory>

namespace weft::ops {

class Stopwatch {
 public:
  virtual ~Stopwatch() = default;
  virtual void stop() = 0;
  // Waits until the device has done what was submitted before stop(); returns the time from start
  // to stop.
  virtual double seconds() const = 0;
};

// Returns whether `device` has a stopwatch and its current stream is not being captured.
bool can_time(const c10::Device& device);
// Starts a stopwatch on the current stream. REQUIRES: can_time(device).
std::unique_ptr<Stopwatch> start_stopwatch(const c10::Device& device);

struct StopwatchMaker {
  bool (*can_time)(const c10::Device& device);
  std::unique_ptr<Stopwatch> (*start)(const c10::Device& device);
};
// Registers the CUDA implementation. Called once, when libweft_ops_cuda.so is loaded.
WEFT_OPS_API void set_cuda_stopwatch(const StopwatchMaker& maker);

}  // namespace weft::ops
