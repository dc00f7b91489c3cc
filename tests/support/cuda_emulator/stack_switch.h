#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Switches between stacks within a thread, in a few nanoseconds on x86-64. Elsewhere, swapcontext
// makes a system call for each switch.
namespace weft::cuda_emulator {

#if defined(__x86_64__)

}  // namespace weft::cuda_emulator

// Pushes the registers that a callee must keep, stores the stack pointer to *from, and continues
// where the stack pointer `to` was stored.
extern "C" void weft_switch_stack(void** from, void* to);

namespace weft::cuda_emulator {

struct StackPoint {
  void* pointer = nullptr;
};

// Sets `point` so that switching to it calls `main` on an empty stack. `main` must not return.
inline void start_on_stack(StackPoint& point, char* stack, std::size_t num_bytes, void (*main)()) {
  // weft_switch_stack pops six registers, and then the return address. A function begins with a
  // stack pointer that is 8 bytes beyond a multiple of 16.
  constexpr std::size_t kNumSaved = 6;
  const auto end = reinterpret_cast<std::uintptr_t>(stack + num_bytes) & ~std::uintptr_t{15};
  auto* const saved = reinterpret_cast<void**>(end) - 2 - kNumSaved;
  std::memset(saved, 0, kNumSaved * sizeof(void*));
  saved[kNumSaved] = reinterpret_cast<void*>(main);
  point.pointer = saved;
}

inline void switch_stack(StackPoint& from, const StackPoint& to) {
  weft_switch_stack(&from.pointer, to.pointer);
}

#else

}  // namespace weft::cuda_emulator

#include <ucontext.h>

namespace weft::cuda_emulator {

struct StackPoint {
  ucontext_t context{};
};

inline void start_on_stack(StackPoint& point, char* stack, std::size_t num_bytes, void (*main)()) {
  getcontext(&point.context);
  point.context.uc_stack.ss_sp = stack;
  point.context.uc_stack.ss_size = num_bytes;
  point.context.uc_link = nullptr;
  makecontext(&point.context, main, 0);
}

inline void switch_stack(StackPoint& from, const StackPoint& to) {
  swapcontext(&from.context, &to.context);
}

#endif

}  // namespace weft::cuda_emulator
