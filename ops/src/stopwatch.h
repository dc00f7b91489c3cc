#pragma once

// How long a device takes for what it is given between start and stop.

#include <weft/ops/export.h>

#include <c10/core/Device.h>

#include <memory>

namespace weft::ops {

class Stopwatch {
 public:
  virtual ~Stopwatch() = default;
  virtual void stop() = 0;
  // Waits until the device has come to the stop.
  virtual double seconds() const = 0;
};

// Not on a device that no stopwatch is known for, nor while its work is captured to be run later.
bool can_time(const c10::Device& device);
// On the current stream. REQUIRES: can_time(device).
std::unique_ptr<Stopwatch> start_stopwatch(const c10::Device& device);

struct StopwatchMaker {
  bool (*can_time)(const c10::Device& device);
  std::unique_ptr<Stopwatch> (*start)(const c10::Device& device);
};
// How that is done on CUDA devices; once, while the library of their operators is loaded.
WEFT_OPS_API void set_cuda_stopwatch(const StopwatchMaker& maker);

}  // namespace weft::ops
