#include "cuda_emulator.h"

#include "stack_switch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// The linker defines these bounds of the section that has all static shared memory. They are
// weak, because there may be no such section.
extern "C" {
extern char __start_weft_emulated_shared[] __attribute__((weak));  // NOLINT
extern char __stop_weft_emulated_shared[] __attribute__((weak));   // NOLINT
}

#if defined(__x86_64__)
asm(R"(
.text
.globl weft_switch_stack
.hidden weft_switch_stack
.type weft_switch_stack, @function
weft_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size weft_switch_stack, .-weft_switch_stack
)");
#endif

namespace weft::cuda_emulator {
namespace {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxGridYZ = 65535;
constexpr unsigned kMaxGridX = 2147483647;
constexpr unsigned kMaxBlockZ = 64;
constexpr std::size_t kDefaultSharedBytes = 48 * 1024;
// Not a multiple of 4096: the frames of all fibres would compete for the same few sets of the
// processor's caches.
constexpr std::size_t kStackBytes = 64 * 1024 + 17 * 64;
constexpr std::size_t kFirstFrameBytes = 1024;  // more than main_of_fibre() needs
constexpr std::size_t kLargestValue = 16;       // of a shuffle, in bytes
constexpr int kPoison = 0xFF;

// The state of a fibre, by which the scheduler selects the next one.
enum class State { kReady, kAtBarrier, kAtShuffle, kEnded };

struct Fibre {
  StackPoint point;
  State state = State::kReady;
  Dims thread_idx;
  // A lane may reach its next shuffle before others have read its value of this one, but not the
  // shuffle after the next: two slots suffice.
  unsigned num_shuffles = 0;
  std::array<std::array<std::byte, kLargestValue>, 2> slots;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#endif
};

std::string text_of(const Dims& dims) {
  return std::to_string(dims.x) + " x " + std::to_string(dims.y) + " x " + std::to_string(dims.z);
}

Indices indices;  // NOLINT: of the thread that runs

// Runs the blocks of one launch.
class Grid {
 public:
  Grid(const Launch& launch, const std::function<void()>& thread)
      : thread_(thread), fibres_(launch.block_size.x * launch.block_size.y * launch.block_size.z) {
    // Reused, because allocating the stacks takes longer than many launches.
    static std::unique_ptr<char[]> stacks;  // NOLINT
    static std::size_t num_stacks = 0;      // NOLINT
    if (num_stacks < fibres_.size()) {
      num_stacks = fibres_.size();
      stacks.reset(new char[num_stacks * kStackBytes]);  // NOLINT: not set to zero
    }
    stacks_ = stacks.get();
    // Exactly as large as the launch needs, so that the address sanitizer finds accesses beyond it.
    shared_ = std::make_unique<char[]>(launch.shared_bytes);
    shared_bytes_ = launch.shared_bytes;
    indices.block_size = launch.block_size;
    indices.grid_size = launch.grid_size;
  }

  void run_block(const Dims& block_idx) {
    indices.block = block_idx;
    if (shared_bytes_ > 0) std::memset(shared_.get(), kPoison, shared_bytes_);
    if (__start_weft_emulated_shared != nullptr) {
      std::memset(
          __start_weft_emulated_shared,
          kPoison,
          static_cast<std::size_t>(__stop_weft_emulated_shared - __start_weft_emulated_shared));
    }
    for (std::size_t i = 0; i < fibres_.size(); ++i) start(i);
    while (!run_to_barrier()) {
    }
  }

  void wait_as(State state) {
    running_->state = state;
    switch_to_scheduler(/*ends=*/false);
  }

  void fail(const std::string& problem) {
    if (failure_.empty()) {
      const Dims& thread = running_->thread_idx;
      failure_ =
          "thread " + text_of(thread) + " of block " + text_of(indices.block) + " " + problem;
    }
    wait_as(State::kEnded);  // never resumed
  }

  Fibre& running() { return *running_; }

  Fibre& partner(int lane_mask) {
    const auto idx = static_cast<std::size_t>(running_ - fibres_.data());
    return fibres_.at((idx / kWarpSize) * kWarpSize +
                      ((idx % kWarpSize) ^ static_cast<unsigned>(lane_mask)));
  }

  void* shared() { return shared_.get(); }

 private:
  void start(std::size_t idx) {
    Fibre& fibre = fibres_[idx];
    const Dims& size = indices.block_size;
    fibre.state = State::kReady;
    fibre.num_shuffles = 0;
    const auto linear = static_cast<unsigned>(idx);
    fibre.thread_idx = {linear % size.x, linear / size.x % size.y, linear / (size.x * size.y)};
#if defined(__SANITIZE_ADDRESS__)
    // An earlier fibre has left main_of_fibre() without returning from it.
    __asan_unpoison_memory_region(stack_of(fibre) + kStackBytes - kFirstFrameBytes,
                                  kFirstFrameBytes);
#endif
    start_on_stack(fibre.point, stack_of(fibre), kStackBytes, &Grid::main_of_fibre);
  }

  static void main_of_fibre();

  // Runs every warp up to the block's next barrier. Returns whether the block has ended.
  bool run_to_barrier() {
    arrange(warps_);
    for (const unsigned warp : warps_) run_warp(warp);
    const auto num_ended = count(0, fibres_.size(), State::kEnded);
    if (num_ended == fibres_.size()) return true;
    if (num_ended > 0) {
      throw Error("block " + text_of(indices.block) + ": " +
                  std::to_string(fibres_.size() - num_ended) + " of " +
                  std::to_string(fibres_.size()) +
                  " threads reached a barrier, and the others ended before it");
    }
    for (Fibre& fibre : fibres_) fibre.state = State::kReady;
    return false;
  }

  // Runs a warp until no lane is ready or at a shuffle.
  void run_warp(unsigned warp) {
    const std::size_t begin = std::size_t{warp} * kWarpSize;
    const std::size_t end = std::min(begin + kWarpSize, fibres_.size());
    while (true) {
      arrange(lanes_);
      for (const unsigned lane : lanes_) {
        const std::size_t idx = begin + lane;
        if (idx < end && fibres_[idx].state == State::kReady) resume(fibres_[idx]);
      }
      const auto num_waiting = count(begin, end, State::kAtShuffle);
      if (num_waiting == 0) return;
      if (num_waiting != kWarpSize) {
        throw Error("block " + text_of(indices.block) + ", warp " + std::to_string(warp) + ": " +
                    std::to_string(num_waiting) +
                    " of 32 lanes reached a shuffle that all must reach");
      }
      for (std::size_t i = begin; i < end; ++i) fibres_[i].state = State::kReady;
    }
  }

  std::size_t count(std::size_t begin, std::size_t end, State state) const {
    return static_cast<std::size_t>(
        std::count_if(fibres_.begin() + static_cast<std::ptrdiff_t>(begin),
                      fibres_.begin() + static_cast<std::ptrdiff_t>(end),
                      [&](const Fibre& fibre) { return fibre.state == state; }));
  }

  // Shuffles `order` if the settings want a random order.
  void arrange(std::vector<unsigned>& order) {
    if (settings().order == Order::kRandom) std::shuffle(order.begin(), order.end(), random_);
  }

  static std::vector<unsigned> first_order(std::size_t size) {
    std::vector<unsigned> order(size);
    std::iota(order.begin(), order.end(), 0U);
    if (settings().order == Order::kReverse) std::reverse(order.begin(), order.end());
    return order;
  }

  char* stack_of(const Fibre& fibre) const {
    return stacks_ + static_cast<std::size_t>(&fibre - fibres_.data()) * kStackBytes;
  }

  void resume(Fibre& fibre) {
    running_ = &fibre;
    indices.thread = fibre.thread_idx;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, stack_of(fibre), kStackBytes);
#endif
    switch_stack(scheduler_, fibre.point);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
    if (!failure_.empty()) {
#if defined(__SANITIZE_ADDRESS__)
      // To the next launch, the frames of abandoned fibres must not look as if they were in use.
      __asan_unpoison_memory_region(stacks_, fibres_.size() * kStackBytes);
#endif
      throw Error(failure_);
    }
  }

  void switch_to_scheduler(bool ends) {
    Fibre& fibre = *running_;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(
        ends ? nullptr : &fibre.fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#else
    static_cast<void>(ends);
#endif
    switch_stack(fibre.point, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fibre.fake_stack, nullptr, nullptr);
#endif
  }

  const std::function<void()>& thread_;
  std::vector<Fibre> fibres_;
  char* stacks_;
  std::unique_ptr<char[]> shared_;
  std::size_t shared_bytes_;
  std::mt19937_64 random_{settings().seed};
  std::vector<unsigned> warps_ = first_order((fibres_.size() + kWarpSize - 1) / kWarpSize);
  std::vector<unsigned> lanes_ = first_order(kWarpSize);
  Fibre* running_ = nullptr;
  StackPoint scheduler_;
  std::string failure_;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_stack_bytes_ = 0;
#endif
};

Grid* grid = nullptr;  // NOLINT: of the launch that runs

void Grid::main_of_fibre() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &grid->scheduler_stack_, &grid->scheduler_stack_bytes_);
#endif
  grid->thread_();
  grid->running_->state = State::kEnded;
  grid->switch_to_scheduler(/*ends=*/true);
}

std::map<const void*, int>& allowed_shared_bytes() {
  static std::map<const void*, int> allowed;
  return allowed;
}

void check(const Launch& launch) {
  const auto is_zero = [](const Dims& dims) { return dims.x == 0 || dims.y == 0 || dims.z == 0; };
  const uint64_t num_threads =
      uint64_t{launch.block_size.x} * launch.block_size.y * launch.block_size.z;
  if (is_zero(launch.block_size) || num_threads > kMaxThreads || launch.block_size.z > kMaxBlockZ) {
    throw Error("a launch has blocks of " + text_of(launch.block_size) +
                " threads; a block has 1 to 1024");
  }
  if (is_zero(launch.grid_size) || launch.grid_size.x > kMaxGridX ||
      launch.grid_size.y > kMaxGridYZ || launch.grid_size.z > kMaxGridYZ) {
    throw Error("a launch has a grid of " + text_of(launch.grid_size) +
                " blocks; a grid has 1 x 1 x 1 to 2147483647 x 65535 x 65535");
  }
  const auto own = allowed_shared_bytes().find(launch.kernel);
  const std::size_t allowed =
      own == allowed_shared_bytes().end()
          ? kDefaultSharedBytes
          : std::max(kDefaultSharedBytes, static_cast<std::size_t>(own->second));
  if (launch.shared_bytes > allowed) {
    throw Error("a launch has " + std::to_string(launch.shared_bytes) +
                " bytes of dynamic shared memory; the kernel may use " + std::to_string(allowed));
  }
}

}  // namespace

Settings& settings() {
  static Settings current;
  return current;
}

void launch(const Launch& launch, const std::function<void()>& thread) {
  check(launch);
  if (settings().launches != nullptr) settings().launches->push_back(launch);
  Grid own(launch, thread);
  grid = &own;
  const Dims& size = launch.grid_size;
  const auto step = [](unsigned num_blocks) {
    return settings().only_outer_blocks ? std::max(1U, num_blocks - 1) : 1U;
  };
  for (unsigned z = 0; z < size.z; z += step(size.z)) {
    for (unsigned y = 0; y < size.y; y += step(size.y)) {
      for (unsigned x = 0; x < size.x; x += step(size.x)) own.run_block({x, y, z});
    }
  }
}

void allow_shared_bytes(const void* kernel, int num_bytes) {
  const Device& device = settings().device;
  if (num_bytes < 0 || num_bytes > device.shared_bytes_per_block) {
    throw Error("a kernel is allowed " + std::to_string(num_bytes) +
                " bytes of dynamic shared memory, but " + device.name + " has only " +
                std::to_string(device.shared_bytes_per_block));
  }
  allowed_shared_bytes()[kernel] = num_bytes;
}

const Indices& current() { return indices; }

void sync_block() { grid->wait_as(State::kAtBarrier); }

void shuffle_xor(
    unsigned mask, const void* value, void* result, std::size_t num_bytes, int lane_mask) {
  if (mask != 0xFFFFFFFFU) grid->fail("shuffles with a mask that lacks lanes");
  if (lane_mask < 0 || lane_mask >= static_cast<int>(kWarpSize))
    grid->fail("shuffles with a lane beyond 31");
  Fibre& own = grid->running();
  const unsigned slot = own.num_shuffles++ % 2;
  std::memcpy(own.slots[slot].data(), value, num_bytes);
  grid->wait_as(State::kAtShuffle);
  std::memcpy(result, grid->partner(lane_mask).slots[slot].data(), num_bytes);
}

void* dynamic_shared_memory() { return grid->shared(); }

}  // namespace weft::cuda_emulator
