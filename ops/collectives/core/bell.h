#pragma once

// How a rank waits for another process: it polls for a while, then sleeps on its doorbell, a futex.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace weft::collectives {

// One per rank, in shared memory. A rank that changes something the owner may be waiting for rings
// afterwards. The owner:
//
//   const uint32_t seen = bell.listen();
//   if (nothing to do) bell.sleep(seen, most);   // returns at once if it was rung since listen()
//   bell.rise();
//
// Thread safety: ring() from any thread; the other three from one thread at a time.
class alignas(64) Bell {
 public:
  void ring();

  uint32_t listen();
  void sleep(uint32_t seen, std::chrono::microseconds most);
  void rise();

 private:
  std::atomic<uint32_t> num_rings_{0};
  std::atomic<uint32_t> asleep_{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Executes the processor's spin-wait hint; call it in each iteration of a polling loop.
void pause();

}  // namespace weft::collectives
