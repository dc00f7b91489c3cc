#pragma once

// How a rank waits for another process: it polls for a while, then sleeps on its doorbell, a futex.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace weft::collectives {

// One per rank, in shared memory. A rank that changes something the owner may be waiting for rings
// afterwards. The owner:
//
//   const uint32_t seen = doorbell.start_listening();
//   if (nothing to do) doorbell.sleep(seen, max_time);  // returns at once if rung since `seen`
//   doorbell.stop_listening();
//
// Thread safety: ring() from any thread; the other three from one thread at a time.
class alignas(64) Doorbell {
 public:
  void ring();

  uint32_t start_listening();
  void sleep(uint32_t seen, std::chrono::microseconds max_time);
  void stop_listening();

 private:
  std::atomic<uint32_t> num_rings_{0};
  std::atomic<uint32_t> is_listening_{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Executes the processor's spin-wait hint; call it in each iteration of a polling loop.
void pause();

}  // namespace weft::collectives
