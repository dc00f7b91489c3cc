#include "fork_guard.h"

#include <atomic>
#include <pthread.h>

namespace weft::collectives {

namespace {
std::atomic<unsigned> generation{0};
}  // namespace

unsigned fork_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace weft::collectives
