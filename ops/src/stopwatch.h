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

// On the current stream. Null where nothing can be timed: on a device that no stopwatch is known
// for, and while its work is captured to be run later.
std::unique_ptr<Stopwatch> start_stopwatch(const c10::Device& device);

using StartStopwatch = std::unique_ptr<Stopwatch> (*)(const c10::Device&);
// How that is done on CUDA devices; once, while the library of their operators is loaded.
WEFT_OPS_API void set_cuda_stopwatch(StartStopwatch start);

}  // namespace weft::ops
