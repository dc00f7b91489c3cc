#include "ledger.h"

#include <pthread.h>
#include <ranges>
#include <utility>

namespace weft::memory {

namespace {

constexpr int kNone = -1;
thread_local int thread_category = kNone;  // of the innermost ScopedCategory

}  // namespace

Ledger::Ledger() : start_(std::chrono::steady_clock::now()) {
  head_.next = head_.previous = &head_;
  phases_.push_back({"start", start_, {}});
}

void Ledger::add(BlockHeader& header) {
  const std::lock_guard lock(mutex_);
  header.category =
      thread_category == kNone ? phase_category_ : static_cast<Category>(thread_category);
  header.sequence = ++num_allocations_;
  header.next = head_.next;
  header.previous = &head_;
  header.next->previous = &header;
  head_.next = &header;
  ++num_blocks_;
  const auto num_bytes = static_cast<int64_t>(header.num_bytes);
  current_[header.category] += num_bytes;
  current_total_ += num_bytes;
  if (current_total_ > peak_.total) peak_ = current_as_peak();
  if (Peak& phase_peak = phases_.back().peak; current_total_ > phase_peak.total)
    phase_peak = current_as_peak();
}

void Ledger::remove(BlockHeader& header) {
  const std::lock_guard lock(mutex_);
  header.previous->next = header.next;
  header.next->previous = header.previous;
  --num_blocks_;
  const auto num_bytes = static_cast<int64_t>(header.num_bytes);
  current_[header.category] -= num_bytes;
  current_total_ -= num_bytes;
}

void Ledger::change(BlockHeader& header, Category category) {
  const auto move = [&](Usage& usage) {
    usage[header.category] -= static_cast<int64_t>(header.num_bytes);
    usage[category] += static_cast<int64_t>(header.num_bytes);
  };
  move(current_);
  // The block is alive, so it is part of every peak that was reached after its allocation.
  if (header.sequence <= peak_.num_allocations) move(peak_.usage);
  for (auto& phase : std::ranges::reverse_view(phases_)) {
    if (header.sequence > phase.peak.num_allocations) break;
    move(phase.peak.usage);
  }
  header.category = category;
}

void Ledger::set_category(BlockHeader& header, Category category) {
  const std::lock_guard lock(mutex_);
  change(header, category);
}

void Ledger::set_category_since(uint64_t mark, Category from, Category to) {
  const std::lock_guard lock(mutex_);
  for (BlockHeader* header = head_.next; header != &head_ && header->sequence > mark;
       header = header->next) {
    if (header->category == from) change(*header, to);
  }
}

void Ledger::set_shared_memory(int64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const int64_t added = num_bytes - std::exchange(shared_memory_, num_bytes);
  current_[Category::kCommunication] += added;
  current_total_ += added;
  if (added <= 0) return;
  Peak& phase_peak = phases_.back().peak;
  const bool is_overall =
      phase_peak.num_allocations == peak_.num_allocations && phase_peak.total == peak_.total;
  phase_peak.usage[Category::kCommunication] += added;
  phase_peak.total += added;
  if (is_overall || phase_peak.total > peak_.total) peak_ = phase_peak;
}

uint64_t Ledger::mark() const {
  const std::lock_guard lock(mutex_);
  return num_allocations_;
}

void Ledger::begin_phase(std::string name, Category category) {
  const std::lock_guard lock(mutex_);
  phase_category_ = category;
  phases_.push_back({std::move(name), std::chrono::steady_clock::now(), current_as_peak()});
  if (phases_.size() > kMaxPhases) phases_.pop_front();
}

std::vector<Phase> Ledger::phases() const {
  const std::lock_guard lock(mutex_);
  std::vector<Phase> phases;
  phases.reserve(phases_.size());
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
  peak_ = current_as_peak();
  phases_.erase(phases_.begin(), phases_.end() - 1);
  phases_.back().peak = current_as_peak();
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
    : previous_(std::exchange(thread_category, static_cast<int>(category))) {}

ScopedCategory::~ScopedCategory() { thread_category = previous_; }

}  // namespace weft::memory
