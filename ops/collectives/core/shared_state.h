#pragma once

// What lies in the shared memory of a group on one host, and where.
//
//   Control | RankBlock x n | signatures x n x 2 | staging x n x 2 | Ring headers and data x n x n
//
// Staging and signatures have two buffers: a rank writes the next ones while a slow one still
// reads. Who may write where and when: see Collective.

#include "bell.h"
#include "parts.h"
#include "signature.h"

#include <weft/collectives/error.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <sys/types.h>

namespace weft::collectives {

// The first failure of a group, for all its ranks. Thread and process safety: any.
class FailureRecord {
 public:
  // Leaves `kind` and `text` unless another failure was left before; returns the one that counts.
  CollectiveError leave(ErrorKind kind, const std::string& text);
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
  uint64_t nonce;  // the segment's: not ours to write
  std::atomic<uint32_t> num_joined{0};
  std::atomic<bool> is_open{false};  // all have joined, and the store is clean again
  // Arrivals of all ranks at all phases so far: phase p is complete at p * num_ranks.
  alignas(64) std::atomic<uint64_t> num_arrivals{0};
  alignas(64) FailureRecord failure;
};

enum class RankState : uint32_t { kAbsent = 0, kJoined, kLeft };

struct RankBlock {
  static constexpr int32_t kNobody = -1;
  alignas(64) std::atomic<RankState> state{RankState::kAbsent};
  pid_t pid = 0;
  uint64_t start_time = 0;                            // of the process: tells a reused pid
  int32_t global_rank = 0;                            // for texts
  std::atomic<int32_t> waits_for{kNobody};            // on another host, for texts
  alignas(64) std::atomic<uint64_t> num_arrivals{0};  // of this rank
  Bell bell;
};

// A byte ring from one rank to another; see Channel.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> num_written{0};
  alignas(64) std::atomic<uint64_t> num_read{0};
};

struct SharedSizes {
  int num_ranks = 1;
  size_t staging_bytes = 0;  // per rank and buffer, a multiple of 128
  size_t ring_bytes = 0;     // per ordered pair, a multiple of 64

  // Staging and rings of all ranks together take at most `limit_bytes`, 16 MiB by default, unless
  // the least of each, a page or a cache line a rank, is more.
  static SharedSizes within(int num_ranks, size_t limit_bytes);
};

// A view of a mapped segment; holds nothing.
class SharedState {
 public:
  static size_t num_bytes(const SharedSizes& sizes);

  SharedState() = default;
  SharedState(std::byte* data, const SharedSizes& sizes);
  // Constructs what lies there. REQUIRES: zeroed memory, and no other rank looks at it yet.
  void initialize() const;

  int num_ranks() const { return sizes_.num_ranks; }
  size_t staging_bytes() const { return sizes_.staging_bytes; }
  size_t ring_bytes() const { return sizes_.ring_bytes; }

  Control& control() const { return *reinterpret_cast<Control*>(data_); }
  RankBlock& rank(int rank) const;
  // The head and the counts (gives, then expects; num_ranks each) of a rank's signature.
  SignatureHead& signature(int rank, int buffer) const;
  std::span<int64_t> signature_counts(int rank, int buffer) const;
  std::byte* staging(int rank, int buffer) const;
  // Where a rank alone writes: offsets in the segment, of its staging and of the rings from it.
  std::array<Part<size_t>, 2> parts_of(int rank) const;
  RingHeader& ring(int from, int to) const;
  std::byte* ring_data(int from, int to) const;

 private:
  std::byte* data_ = nullptr;
  SharedSizes sizes_;
  size_t signatures_ = 0;  // offsets
  size_t staging_ = 0;
  size_t rings_ = 0;
};

}  // namespace weft::collectives
