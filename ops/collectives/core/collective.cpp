#include "collective.h"

#include "exchanges.h"
#include "reductions.h"

#include <algorithm>
#include <utility>

namespace weft::collectives {

void Operation::finish(std::exception_ptr error) {
  error_ = std::move(error);
  finishing_.store(true);
  if (on_done) {
    try {
      on_done(error_);
    } catch (...) {
      error_ = std::current_exception();
    }
    on_done = nullptr;  // releases what it captured
  }
  done_.store(true);
}

std::string Collective::describe() const {
  return call_.purpose.empty() ? collectives::describe(call_.signature()) : call_.purpose;
}

bool Collective::advance(const SharedState& shared, int rank, CollectiveCursor& cursor) {
  const auto staging = [&](int64_t chunk) {
    return staging_of(chunk, shared, rank, cursor.buffer);
  };
  for (;; ++step_) {
    if (step_ == 0) {
      begin(shared, rank, cursor);
    } else if (!cursor.barrier.is_complete()) {
      return false;
    }
    if (step_ == 1) compare(shared);
    const int64_t to_drain = step_ - (combines() ? 2 : 1);
    const int64_t last_arrival = num_chunks_ - (combines() ? 0 : 1);

    if (combines() && step_ >= 1 && step_ <= num_chunks_) combine(step_ - 1, staging(step_ - 1));
    if (step_ < num_chunks_) fill(step_, staging(step_));
    if (to_drain >= 0) drain(to_drain, staging(to_drain));
    if (step_ <= last_arrival) {
      cursor.barrier.arrive();
      continue;
    }
    cursor.buffer = 1 - half_of(num_chunks_ - 1, cursor.buffer) / 2;
    return true;
  }
}

void Collective::begin(const SharedState& shared, int rank, CollectiveCursor& cursor) {
  call_.header.sequence = ++cursor.sequence;
  chunks_are_full_buffers_ =
      uses_one_full_buffer(shared.staging_bytes()) || alternates_full_buffers();
  const Staging first = staging_of(0, shared, rank, cursor.buffer);
  num_chunks_ = num_chunks(first.num_bytes(), shared.num_ranks());
  call_.header.num_chunks = num_chunks_;
  publish(shared, rank);
}

int Collective::half_of(int64_t chunk, int first_buffer) const {
  if (alternates_full_buffers()) return static_cast<int>(2 * ((first_buffer + chunk) % 2));
  const int64_t num_halves = combines() ? 3 : 2;
  return static_cast<int>((int64_t{2} * first_buffer + chunk % num_halves) % 4);
}

Staging Collective::staging_of(int64_t chunk,
                               const SharedState& shared,
                               int rank,
                               int first_buffer) const {
  const size_t half_bytes = shared.staging_bytes() / 2;
  const auto offset = static_cast<size_t>(half_of(chunk, first_buffer)) * half_bytes;
  return {shared, rank, offset, chunks_are_full_buffers_ ? shared.staging_bytes() : half_bytes};
}

void Collective::publish(const SharedState& shared, int rank) const {
  const int parity = static_cast<int>(header().sequence % 2);
  shared.signature(rank, parity) = header();
  auto counts = shared.signature_counts(rank, parity);
  std::ranges::copy(call_.send_counts, counts.begin());
  std::ranges::copy(call_.receive_counts, counts.begin() + shared.num_ranks());
}

void Collective::compare(const SharedState& shared) {
  const int parity = static_cast<int>(header().sequence % 2);
  std::vector<Signature> by_rank;
  by_rank.reserve(static_cast<size_t>(shared.num_ranks()));
  const auto n = static_cast<size_t>(shared.num_ranks());
  for (int peer = 0; peer < shared.num_ranks(); ++peer) {
    const SignatureHeader& header = shared.signature(peer, parity);
    const std::span<const int64_t> counts = shared.signature_counts(peer, parity);
    // The peer may have called an operation without counts.
    const size_t num_counts = has_counts(header.op) ? n : 0;
    by_rank.push_back({header, counts.first(num_counts), counts.last(num_counts)});
    num_chunks_ = std::max(num_chunks_, header.num_chunks);
  }
  if (auto text = mismatch(by_rank)) {
    throw CollectiveMismatchError("at collective " + std::to_string(header().sequence) + ", " +
                                  *text);
  }
  if (call_.make_outputs) call_.outputs = call_.make_outputs(num_elements_of(by_rank));
}

std::string mismatch_message(const std::string& group, const std::string& what) {
  return "weft: the ranks of group '" + group + "' made calls that do not match: " + what +
         "; call the same operations in the same order with matching arguments on every rank";
}

CollectivePtr make_collective(CollectiveCall call, int rank) {
  switch (call.header.op) {
    case Op::kAllReduce:
    case Op::kReduce:
    case Op::kReduceScatter:
      return make_reduction(std::move(call), rank);
    default:
      return make_exchange(std::move(call));
  }
}

}  // namespace weft::collectives
