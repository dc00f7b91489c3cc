#pragma once

// The ledger of memory: the allocator records every block in it when the block is allocated and
// removes the block when it is freed. The ledger keeps the current bytes per category, and the
// peak, that is the bytes per category when their sum was largest, overall and for each phase. A
// phase is a period of the run, such as a forward. Thread-safe. A forked child has a copy of its
// parent's ledger.

#include <weft/memory/usage.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace weft::memory {

// The ledger's record of a block, in the 64 bytes before it.
struct alignas(64) BlockHeader {
  size_t num_bytes = 0;   // as requested
  uint64_t sequence = 0;  // number of the allocation, from 1
  BlockHeader* previous = nullptr;
  BlockHeader* next = nullptr;
  Category category = Category::kOther;
};
static_assert(sizeof(BlockHeader) == 64);

class Ledger {
 public:
  Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Records a block. REQUIRES: `header.num_bytes` is set. The category is that of this thread's
  // ScopedCategory or, without one, that of the phase.
  void add(BlockHeader& header);
  void remove(BlockHeader& header);

  // Changes the category of a block, also in all peaks that include the block, as if it had had the
  // category from the start.
  void set_category(BlockHeader& header, Category category);
  // Changes the category of all live blocks that have category `from` and were allocated after
  // mark() returned `mark`, in the same way.
  void set_category_since(uint64_t mark, Category from, Category to);
  uint64_t mark() const;

  // Sets the total of shared memory for communication, which no allocator reports. An increase
  // since the last call is also added to the peak of the current phase, because the memory may have
  // been allocated before that peak.
  void set_shared_memory(int64_t num_bytes);

  // Begins a phase. Blocks allocated in it get `category` by default.
  void begin_phase(std::string name, Category category);
  // Returns the newest kMaxPhases phases, from the oldest to the current one.
  std::vector<Phase> phases() const;
  static constexpr size_t kMaxPhases = 4096;

  Totals totals() const;
  // Resets the peak and drops all phases but the current one.
  void reset_peak();

 private:
  struct Peak {
    Usage usage;
    int64_t total = 0;
    uint64_t num_allocations = 0;  // so far, when the peak was reached
  };
  struct PhaseRecord {
    std::string name;
    std::chrono::steady_clock::time_point start;
    Peak peak;
  };
  friend struct ForkHandlers;

  // REQUIRES (both): the lock is held.
  void change(BlockHeader& header, Category category);
  Peak current_as_peak() const { return {current_, current_total_, num_allocations_}; }

  mutable std::mutex mutex_;
  const std::chrono::steady_clock::time_point start_;
  BlockHeader head_;  // of the circular list of live blocks, newest first; not a block itself
  Usage current_;
  int64_t current_total_ = 0;
  int64_t shared_memory_ = 0;
  Peak peak_;
  uint64_t num_allocations_ = 0;
  uint64_t num_blocks_ = 0;
  Category phase_category_ = Category::kOther;  // of the current phase
  std::deque<PhaseRecord> phases_;
};

// While a ScopedCategory exists, blocks that its thread allocates get `category` instead of the
// category of the phase.
class ScopedCategory {
 public:
  explicit ScopedCategory(Category category);
  ~ScopedCategory();
  ScopedCategory(const ScopedCategory&) = delete;
  ScopedCategory& operator=(const ScopedCategory&) = delete;

 private:
  const int previous_;
};

// The ledger of this process. Never destroyed, because blocks may be freed at process exit.
Ledger& ledger();

}  // namespace weft::memory
