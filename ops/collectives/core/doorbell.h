#pragma once

// How a rank waits for another process: it polls for a while, then sleeps on its doorbell, a futex.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace weft::collectives {

// One per rank, in shared memory. A rank that has changed state for which the owner may wait rings
// the owner's doorbell. The owner:
//
//   const uint32_t num_rings = doorbell.start_listening();
//   if (there is nothing to do) doorbell.sleep(num_rings, max_time);
//   doorbell.stop_listening();
//
// sleep() returns at once if the doorbell has been rung since start_listening().
//
// Thread safety: ring() may be called from any thread, the other three functions from one thread at
// a time.
class alignas(64) Doorbell {
 public:
  void ring();

  uint32_t start_listening();
  void sleep(uint32_t num_rings, std::chrono::microseconds max_time);
  void stop_listening();

 private:
  std::atomic<uint32_t> num_rings_{0};
  std::atomic<uint32_t> is_listening_{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Executes the processor's spin-wait hint; call it in each iteration of a polling loop.
void pause();

}  // namespace weft::collectives
