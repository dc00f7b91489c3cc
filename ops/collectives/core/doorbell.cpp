#include "doorbell.h"

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft::collectives {

namespace {

// NOTE: not FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  // The system call compares the word with `value` atomically. The result is ignored: after any
  // error possible here (the word changed, time-out, signal) the caller checks its condition again.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void Doorbell::ring() {
  // Sequentially consistent, like the stores and loads of the owner: either ring() sees that the
  // owner is listening, or the owner sees the new count before it sleeps.
  num_rings_.fetch_add(1);
  if (is_listening_.load() != 0) futex(&num_rings_, FUTEX_WAKE, INT_MAX, nullptr);
}

uint32_t Doorbell::start_listening() {
  is_listening_.store(1);
  return num_rings_.load();
}

void Doorbell::sleep(uint32_t num_rings, std::chrono::microseconds max_time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(max_time);
  const timespec timeout{seconds.count(), (max_time - seconds).count() * 1000};
  futex(&num_rings_, FUTEX_WAIT, num_rings, &timeout);
}

void Doorbell::stop_listening() { is_listening_.store(0, std::memory_order_relaxed); }

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace weft::collectives
