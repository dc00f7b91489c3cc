#pragma once

// The layout of the shared memory of a group on one host, for n ranks:
//
//   Control | RankBlock x n | signatures x n x 2 | staging x n x 2 | Ring headers and data x n x n
//
// A rank copies data of collectives through its staging buffers, and data of messages through
// one ring for each destination rank. Staging and signatures have two buffers per rank: a rank
// writes the next buffer while a slower rank still reads the previous one. collective.h says when a
// rank may overwrite a buffer.

#include "doorbell.h"
#include "ranges.h"
#include "signature.h"

#include <weft/collectives/error.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sched.h>
#include <span>
#include <string>
#include <sys/types.h>

namespace weft::collectives {

// The first failure of a group, for all its ranks. Safe to use from any thread of any process.
class FailureRecord {
 public:
  // Records a failure unless one was recorded before; returns the first one.
  CollectiveError record(ErrorKind kind, const std::string& text);
  bool is_set() const { return state_.load(std::memory_order_acquire) == kReady; }
  // REQUIRES: is_set().
  CollectiveError get() const;

 private:
  static constexpr uint32_t kEmpty = 0, kWriting = 1, kReady = 2;
  std::atomic<uint32_t> state_{kEmpty};
  uint32_t kind_ = 0;
  uint32_t num_chars_ = 0;
  std::array<char, 4000> text_{};
};

struct Control {
  uint64_t nonce;  // written by Segment
  std::atomic<uint32_t> num_joined{0};
  std::atomic<bool> is_open{
      false};  // all ranks have joined, and rank 0 has removed the group's keys from the store
  // Arrivals of all ranks at barriers so far: phase p (see barrier.h) is complete at p * num_ranks.
  alignas(64) std::atomic<uint64_t> num_arrivals{0};
  alignas(64) FailureRecord failure;
};

enum class RankState : uint32_t { kAbsent = 0, kJoined, kLeft };

struct RankBlock {
  static constexpr int32_t kNoRank = -1;
  alignas(64) std::atomic<RankState> state{RankState::kAbsent};
  pid_t pid = 0;
  uint64_t start_time = 0;                            // of the process: detects a reused pid
  int32_t global_rank = 0;                            // for error messages
  std::atomic<int32_t> waits_for{kNoRank};            // a rank of another host
  std::atomic<int32_t> processor{-1};                 // on which this rank last began to wait
  cpu_set_t processors{};                             // that this rank could use when it joined
  alignas(64) std::atomic<uint64_t> num_arrivals{0};  // of this rank
  Doorbell doorbell;
};

// A byte ring from one rank to another; see ring.h.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> num_written{0};
  alignas(64) std::atomic<uint64_t> num_read{0};
};

struct SharedSizes {
  int num_ranks = 1;
  size_t staging_bytes = 0;  // per rank and buffer, a multiple of 128
  size_t ring_bytes = 0;     // per ordered pair, a multiple of 64

  // Returns sizes such that staging buffers and rings of all ranks together have at most
  // `limit_bytes`, unless their minimum sizes need more: a page per ring; per staging buffer, two
  // cache lines for each rank, rounded up to pages.
  static SharedSizes within(int num_ranks, size_t limit_bytes);
};

// A non-owning view of a mapped segment.
class SharedState {
 public:
  static size_t num_bytes(const SharedSizes& sizes);

  SharedState() = default;
  SharedState(std::byte* data, const SharedSizes& sizes);
  // Constructs the objects in the segment. REQUIRES: the memory is zeroed except for the nonce, and
  // no other rank reads it yet.
  void initialize() const;

  int num_ranks() const { return sizes_.num_ranks; }
  size_t staging_bytes() const { return sizes_.staging_bytes; }
  size_t ring_bytes() const { return sizes_.ring_bytes; }

  Control& control() const { return *reinterpret_cast<Control*>(data_); }
  RankBlock& rank(int rank) const;
  // The header and the counts (send, then receive; num_ranks each) of a rank's signature.
  SignatureHeader& signature(int rank, int buffer) const;
  std::span<int64_t> signature_counts(int rank, int buffer) const;
  std::byte* staging(int rank, int buffer) const;
  // Returns the ranges of the segment for the data that `rank` writes: its staging buffers and the
  // rings from it.
  std::array<Range<size_t>, 2> ranges_written_by(int rank) const;
  RingHeader& ring(int from, int to) const;
  std::byte* ring_data(int from, int to) const;

 private:
  std::byte* data_ = nullptr;
  SharedSizes sizes_;
  size_t signatures_ = 0;  // offsets in the segment, in bytes
  size_t staging_ = 0;
  size_t rings_ = 0;
};

}  // namespace weft::collectives
