#include "barrier.h"

namespace weft::collectives {

void Barrier::arrive() {
  ++phase_;
  shared_.rank(rank_).num_arrivals.store(phase_, std::memory_order_release);
  const uint64_t before = shared_.control().num_arrivals.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 != phase_ * static_cast<uint64_t>(shared_.num_ranks())) return;
  for (int peer = 0; peer < shared_.num_ranks(); ++peer) {
    if (peer != rank_) shared_.rank(peer).doorbell.ring();
  }
}

bool Barrier::is_complete() const {
  return shared_.control().num_arrivals.load(std::memory_order_acquire) >=
         phase_ * static_cast<uint64_t>(shared_.num_ranks());
}

bool Barrier::has_arrived(int rank) const {
  return shared_.rank(rank).num_arrivals.load(std::memory_order_acquire) >= phase_;
}

}  // namespace weft::collectives
