#pragma once

// Who holds how many bytes: every block of memory is entered when it is allocated and struck out
// when it is freed. Thread safety: all of it; a forked child has a ledger of its own that goes on
// where its parent's was.

#include <weft/memory/usage.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace weft::memory {

// Stands in the 64 bytes before a block; the ledger's own.
struct alignas(64) BlockHead {
  size_t num_bytes = 0;  // as requested
  uint64_t sequence = 0;
  BlockHead* previous = nullptr;
  BlockHead* next = nullptr;
  Category category = Category::kOther;
};
static_assert(sizeof(BlockHead) == 64);

class Ledger {
 public:
  Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // `head.num_bytes` is set; the rest is filled in. The category is the one of this thread, or
  // else of the phase.
  void add(BlockHead& head);
  void remove(BlockHead& head);

  // A block changes its category in all peaks that it has been part of, too: what is known later of
  // a block holds for all its life.
  void set_category(BlockHead& head, Category category);
  // The same for all living blocks of `from` that came after the mark().
  void set_category_since(uint64_t mark, Category from, Category to);
  uint64_t mark() const;

  // Memory for communication that no allocator sees, as a whole. What has been added since the last
  // call counts as there at the peaks of the phase, too: that is as late as it can have come.
  void set_shared_memory(int64_t num_bytes);

  // Blocks to come are of `category`.
  void begin_phase(std::string name, Category category);
  // The oldest first, the present one last; of a long run the newest kMostPhases.
  std::vector<Phase> phases() const;
  static constexpr size_t kMostPhases = 4096;

  Totals totals() const;
  // Forgets the peak, and all phases but the present one.
  void reset_peak();

 private:
  struct Peak {
    Usage usage;
    int64_t total = 0;
    uint64_t sequence = 0;  // of the newest block then
  };
  struct PhaseRecord {
    std::string name;
    std::chrono::steady_clock::time_point start;
    Peak peak;
  };
  friend struct ForkHandlers;

  // REQUIRES, of all: the lock.
  void change(BlockHead& head, Category category);
  Peak now() const { return {current_, current_total_, num_allocations_}; }

  mutable std::mutex mutex_;
  const std::chrono::steady_clock::time_point start_;
  BlockHead newest_;  // the anchor of the list of living blocks, the newest first
  Usage current_;
  int64_t current_total_ = 0;
  int64_t shared_memory_ = 0;
  Peak peak_;
  uint64_t num_allocations_ = 0;
  uint64_t num_blocks_ = 0;
  Category default_ = Category::kOther;
  std::deque<PhaseRecord> phases_;
};

// Blocks that this thread allocates while it lives are of `category`, whatever the process does.
class ScopedCategory {
 public:
  explicit ScopedCategory(Category category);
  ~ScopedCategory();
  ScopedCategory(const ScopedCategory&) = delete;
  ScopedCategory& operator=(const ScopedCategory&) = delete;

 private:
  const int previous_;
};

// The process's. Never destroyed: blocks may be freed at its very end.
Ledger& ledger();

}  // namespace weft::memory
