#include "ledger.h"

#include <pthread.h>
#include <utility>

namespace weft::memory {

namespace {

constexpr int kNone = -1;
thread_local int category_here = kNone;

}  // namespace

Ledger::Ledger() : start_(std::chrono::steady_clock::now()) {
  newest_.next = newest_.previous = &newest_;
  phases_.push_back({"start", start_, {}});
}

void Ledger::add(BlockHead& head) {
  const std::lock_guard lock(mutex_);
  head.category = category_here == kNone ? default_ : static_cast<Category>(category_here);
  head.sequence = ++num_allocations_;
  head.next = newest_.next;
  head.previous = &newest_;
  head.next->previous = &head;
  newest_.next = &head;
  ++num_blocks_;
  const auto num_bytes = static_cast<int64_t>(head.num_bytes);
  current_[head.category] += num_bytes;
  current_total_ += num_bytes;
  if (current_total_ > peak_.total) peak_ = now();
  if (Peak& of_phase = phases_.back().peak; current_total_ > of_phase.total) of_phase = now();
}

void Ledger::remove(BlockHead& head) {
  const std::lock_guard lock(mutex_);
  head.previous->next = head.next;
  head.next->previous = head.previous;
  --num_blocks_;
  const auto num_bytes = static_cast<int64_t>(head.num_bytes);
  current_[head.category] -= num_bytes;
  current_total_ -= num_bytes;
}

void Ledger::change(BlockHead& head, Category category) {
  const auto move = [&](Usage& usage) {
    usage[head.category] -= static_cast<int64_t>(head.num_bytes);
    usage[category] += static_cast<int64_t>(head.num_bytes);
  };
  move(current_);
  // The block is alive, so it is part of every peak that was reached after its allocation.
  if (head.sequence <= peak_.sequence) move(peak_.usage);
  for (auto phase = phases_.rbegin(); phase != phases_.rend(); ++phase) {
    if (head.sequence > phase->peak.sequence) break;
    move(phase->peak.usage);
  }
  head.category = category;
}

void Ledger::set_category(BlockHead& head, Category category) {
  const std::lock_guard lock(mutex_);
  change(head, category);
}

void Ledger::set_category_since(uint64_t mark, Category from, Category to) {
  const std::lock_guard lock(mutex_);
  for (BlockHead* head = newest_.next; head != &newest_ && head->sequence > mark;
       head = head->next) {
    if (head->category == from) change(*head, to);
  }
}

void Ledger::set_shared_memory(int64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const int64_t added = num_bytes - std::exchange(shared_memory_, num_bytes);
  current_[Category::kCommunication] += added;
  current_total_ += added;
  if (added <= 0) return;
  Peak& of_phase = phases_.back().peak;
  const bool is_overall = of_phase.sequence == peak_.sequence && of_phase.total == peak_.total;
  of_phase.usage[Category::kCommunication] += added;
  of_phase.total += added;
  if (is_overall || of_phase.total > peak_.total) peak_ = of_phase;
}

uint64_t Ledger::mark() const {
  const std::lock_guard lock(mutex_);
  return num_allocations_;
}

void Ledger::begin_phase(std::string name, Category category) {
  const std::lock_guard lock(mutex_);
  default_ = category;
  phases_.push_back({std::move(name), std::chrono::steady_clock::now(), now()});
  if (phases_.size() > kMostPhases) phases_.pop_front();
}

std::vector<Phase> Ledger::phases() const {
  const std::lock_guard lock(mutex_);
  std::vector<Phase> phases;
  for (const PhaseRecord& record : phases_) {
    phases.push_back({record.name,
                      std::chrono::duration<double>(record.start - start_).count(),
                      record.peak.usage});
  }
  return phases;
}

Totals Ledger::totals() const {
  const std::lock_guard lock(mutex_);
  return {current_, peak_.usage, num_allocations_, num_blocks_};
}

void Ledger::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_ = now();
  phases_.erase(phases_.begin(), phases_.end() - 1);
  phases_.back().peak = now();
}

// fork() may be called while another thread holds the lock, which would stay locked in the child.
struct ForkHandlers {
  static void lock() { ledger().mutex_.lock(); }
  static void unlock() { ledger().mutex_.unlock(); }
};

Ledger& ledger() {
  static Ledger* const the_ledger = [] {
    auto* made = new Ledger;
    pthread_atfork(ForkHandlers::lock, ForkHandlers::unlock, ForkHandlers::unlock);
    return made;
  }();
  return *the_ledger;
}

ScopedCategory::ScopedCategory(Category category)
    : previous_(std::exchange(category_here, static_cast<int>(category))) {}

ScopedCategory::~ScopedCategory() { category_here = previous_; }

}  // namespace weft::memory
