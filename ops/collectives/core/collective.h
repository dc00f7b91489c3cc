#pragma once

// One collective as a non-blocking state machine: advance() makes all possible progress and returns
// where it needs ranks that have not arrived yet.
//
// Every rank has staging buffers in shared memory, through which tensors pass one chunk at a time.
// A chunk goes through these stages, with a barrier between two stages:
//   fill     a rank writes its data into its own buffer,
//   combine  (some collectives) a rank reads the filled buffers of all ranks, and writes its
//            segment of the result into its own buffer,
//   drain    a rank reads the buffers of all ranks into its result.
// Chunks are pipelined: at step s a rank combines chunk s - 1, fills chunk s, drains chunk s - 1
// (s - 2 in a collective that combines), and arrives at the barrier. Therefore a collective of n
// chunks waits n times, or n + 1 times if it combines.
//
// A rank has two buffers of two halves each. Successive chunks rotate through two halves, through
// three halves if the collective combines, or through the two full buffers; a single chunk may use
// one full buffer. A half is refilled only at a step that begins after all ranks have drained it.
// At its last arrival a rank has drained all but the last chunk, so the next collective begins in
// the buffer that does not hold that chunk.

#include "barrier.h"
#include "call.h"
#include "operation.h"
#include "shared_state.h"

#include <memory>
#include <utility>

namespace weft::collectives {

// The range of the staging buffers that a chunk uses.
class Staging {
 public:
  Staging(const SharedState& shared, int rank, size_t offset, size_t num_bytes)
      : shared_(shared), rank_(rank), offset_(offset), num_bytes_(num_bytes) {}

  std::byte* own() const { return of(rank_); }
  std::byte* of(int rank) const { return shared_.staging(rank, 0) + offset_; }
  size_t num_bytes() const { return num_bytes_; }
  int rank() const { return rank_; }
  int num_ranks() const { return shared_.num_ranks(); }

 private:
  SharedState shared_;
  int rank_;
  size_t offset_;
  size_t num_bytes_;
};

// The position of a rank in its group's sequence of collectives. Ranks that have completed the same
// collectives have the same `sequence` and `buffer`.
struct CollectiveCursor {
  Barrier barrier;
  uint64_t sequence = 0;  // number of collectives begun
  int buffer = 0;  // 0 or 1: the staging buffer of the first chunk of this or the next collective
};

class Collective : public Operation {
 public:
  explicit Collective(CollectiveCall call) : call_(std::move(call)) {}

  // Makes progress without waiting; returns true when the result is complete.
  // Errors: CollectiveMismatchError when the ranks' calls do not match.
  bool advance(const SharedState& shared, int rank, CollectiveCursor& cursor);

  uint64_t sequence() const { return header().sequence; }
  std::string describe() const override;

 protected:
  // Whether all data is one chunk, which uses a full buffer of `buffer_bytes` instead of a half.
  // The same on all ranks whose calls match.
  virtual bool uses_one_full_buffer(size_t /*buffer_bytes*/) const { return false; }
  // Whether chunks alternate between the two full buffers instead of halves: fewer barriers, more
  // memory in use. REQUIRES: not combines(). The same on all ranks whose calls match.
  virtual bool alternates_full_buffers() const { return false; }
  // Returns how many chunks of `staging_bytes` this rank needs; all ranks run the maximum.
  virtual int64_t num_chunks(size_t staging_bytes, int num_ranks) const = 0;
  virtual bool combines() const { return false; }
  virtual void fill(int64_t chunk, const Staging& staging) = 0;
  virtual void combine(int64_t /*chunk*/, const Staging& /*staging*/) {}
  virtual void drain(int64_t chunk, const Staging& staging) = 0;

  const CollectiveCall& call() const { return call_; }
  const SignatureHeader& header() const { return call_.header; }

 private:
  void begin(const SharedState& shared, int rank, CollectiveCursor& cursor);
  Staging staging_of(int64_t chunk, const SharedState& shared, int rank, int first_buffer) const;
  int half_of(int64_t chunk, int first_buffer) const;
  void publish(const SharedState& shared, int rank) const;
  void compare(const SharedState& shared);

  CollectiveCall call_;
  int64_t step_ = 0;  // the next step
  int64_t num_chunks_ = 0;
  bool chunks_are_full_buffers_ = false;  // else halves
};

using CollectivePtr = std::shared_ptr<Collective>;

// Returns the message of a CollectiveMismatchError; `what` lists the ranks' calls.
std::string mismatch_message(const std::string& group, const std::string& what);

// Returns the collective that carries out `call` on rank `rank`.
CollectivePtr make_collective(CollectiveCall call, int rank);

}  // namespace weft::collectives
