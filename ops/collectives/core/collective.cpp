#include "collective.h"

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

Collective::Collective(SignatureHead head, std::vector<int64_t> gives, std::vector<int64_t> expects)
    : head_(head), gives_(std::move(gives)), expects_(std::move(expects)) {}

std::string Collective::describe() const {
  return collectives::describe({head_, gives_, expects_});
}

bool Collective::advance(const SharedState& shared, int rank, CollectiveCursor& cursor) {
  for (;;) {
    const Staging staging(shared, rank, static_cast<int>(cursor.num_chunks % 2));
    switch (stage_) {
      case Stage::kFill:
        if (chunk_ == 0) {
          head_.sequence = ++cursor.sequence;
          num_chunks_ = num_chunks(shared.staging_bytes(), shared.num_ranks());
          head_.num_chunks = num_chunks_;
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
  const int buffer = static_cast<int>(head_.sequence % 2);
  shared.signature(rank, buffer) = head_;
  auto counts = shared.signature_counts(rank, buffer);
  std::ranges::copy(gives_, counts.begin());
  std::ranges::copy(expects_, counts.begin() + shared.num_ranks());
}

void Collective::compare(const SharedState& shared) {
  const int buffer = static_cast<int>(head_.sequence % 2);
  std::vector<Signature> by_rank;
  by_rank.reserve(static_cast<size_t>(shared.num_ranks()));
  const auto n = static_cast<size_t>(shared.num_ranks());
  for (int peer = 0; peer < shared.num_ranks(); ++peer) {
    const SignatureHead& head = shared.signature(peer, buffer);
    const std::span<const int64_t> counts = shared.signature_counts(peer, buffer);
    // Which counts a rank has follows from its operation; one that brought another has others.
    const bool gives = head.op == Op::kReduceScatter || head.op == Op::kAllGather ||
                       head.op == Op::kGather || head.op == Op::kScatter ||
                       head.op == Op::kAllToAll;
    by_rank.push_back({head, counts.first(gives ? n : 0), counts.last(gives ? n : 0)});
    num_chunks_ = std::max(num_chunks_, head.num_chunks);
  }
  if (auto text = mismatch(by_rank)) {
    throw CollectiveMismatchError("at collective " + std::to_string(head_.sequence) + ", " + *text);
  }
}

}  // namespace weft::collectives
