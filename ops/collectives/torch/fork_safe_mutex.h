#pragma once

#include <mutex>
#include <pthread.h>

namespace weft::collectives {

// Returns the mutex of this process for `Tag`. A fork waits until no other thread holds it, so that
// it is free in the child. A thread holds at most one such mutex at a time.
template <class Tag>
std::mutex& fork_safe_mutex() {
  // NOTE: never destroyed: groups and calls may outlive the static objects.
  static std::mutex* const mutex = [] {
    static auto* const made = new std::mutex;
    ::pthread_atfork([] { made->lock(); }, [] { made->unlock(); }, [] { made->unlock(); });
    return made;
  }();
  return *mutex;
}

}  // namespace weft::collectives
