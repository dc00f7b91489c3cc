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
    on_done = nullptr;  // what it held on to
  }
  done_.store(true);
}

std::string Collective::describe() const {
  return call_.purpose.empty() ? collectives::describe(call_.signature()) : call_.purpose;
}

bool Collective::advance(const SharedState& shared, int rank, CollectiveCursor& cursor) {
  for (;;) {
    const Staging staging(shared, rank, static_cast<int>(cursor.num_chunks % 2));
    switch (stage_) {
      case Stage::kFill:
        if (chunk_ == 0) {
          call_.head.sequence = ++cursor.sequence;
          num_chunks_ = num_chunks(shared.staging_bytes(), shared.num_ranks());
          call_.head.num_chunks = num_chunks_;
          publish(shared, rank);
        }
        if (!std::exchange(is_filled_ahead_, false)) fill(chunk_, staging);
        cursor.phases.arrive();
        stage_ = Stage::kFilled;
        break;
      case Stage::kFilled:
        if (!cursor.phases.is_complete()) return false;
        if (chunk_ == 0) compare(shared);
        if (combines()) {
          combine(chunk_, staging);
          cursor.phases.arrive();
          stage_ = Stage::kCombined;
          if (chunk_ + 1 < num_chunks_) {
            fill(chunk_ + 1, Staging(shared, rank, 1 - staging.buffer()));
            is_filled_ahead_ = true;
          }
          break;
        }
        [[fallthrough]];
      case Stage::kCombined:
        if (stage_ == Stage::kCombined && !cursor.phases.is_complete()) return false;
        drain(chunk_, staging);
        ++cursor.num_chunks;
        if (++chunk_ == num_chunks_) return true;
        stage_ = Stage::kFill;
        break;
    }
  }
}

void Collective::publish(const SharedState& shared, int rank) const {
  const int buffer = static_cast<int>(head().sequence % 2);
  shared.signature(rank, buffer) = head();
  auto counts = shared.signature_counts(rank, buffer);
  std::ranges::copy(call_.gives, counts.begin());
  std::ranges::copy(call_.expects, counts.begin() + shared.num_ranks());
}

void Collective::compare(const SharedState& shared) {
  const int buffer = static_cast<int>(head().sequence % 2);
  std::vector<Signature> by_rank;
  by_rank.reserve(static_cast<size_t>(shared.num_ranks()));
  const auto n = static_cast<size_t>(shared.num_ranks());
  for (int peer = 0; peer < shared.num_ranks(); ++peer) {
    const SignatureHead& head = shared.signature(peer, buffer);
    const std::span<const int64_t> counts = shared.signature_counts(peer, buffer);
    // Which counts a rank has follows from its operation; one that brought another has others.
    const size_t num_counts = has_counts(head.op) ? n : 0;
    by_rank.push_back({head, counts.first(num_counts), counts.last(num_counts)});
    num_chunks_ = std::max(num_chunks_, head.num_chunks);
  }
  if (auto text = mismatch(by_rank)) {
    throw CollectiveMismatchError("at collective " + std::to_string(head().sequence) + ", " +
                                  *text);
  }
}

std::string calls_misfit(const std::string& group, const std::string& what) {
  return "weft: the ranks of group '" + group +
         "' made calls that do not belong together: " + what +
         "; make every rank call the same operations in the same order with fitting arguments";
}

CollectivePtr make_collective(CollectiveCall call, int rank) {
  switch (call.head.op) {
    case Op::kAllReduce:
    case Op::kReduce:
    case Op::kReduceScatter:
      return make_reduction(std::move(call), rank);
    default:
      return make_exchange(std::move(call));
  }
}

}  // namespace weft::collectives
