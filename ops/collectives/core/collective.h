#pragma once

// One collective as a machine that never waits: it goes on from where it stands whenever it is
// called, and stops where other ranks have not come yet.
//
// The tensors travel through the ranks' staging buffers a chunk at a time. Each chunk is
//   filled: a rank writes its part into its own buffer,
//   [combined: it reads what all have filled, and writes its share of the result into its own]
//   drained: it reads the buffers into its result,
// each after all ranks have arrived at the end of the one before. Several chunks are in flight
// at once: at step s a rank combines chunk s - 1, fills chunk s, drains the chunk before those, and
// arrives. So a collective of n chunks waits n times, n + 1 times where it combines.
//
// A rank has two buffers of two halves each, and the chunks take two halves in turn, or three where
// they are combined, or both buffers in turn: a half is filled again at a step that begins when
// everybody has drained it. At its last arrival a rank has drained all but the last chunk, so the
// next collective begins in the buffer where that chunk is not.

#include "call.h"
#include "operation.h"
#include "phases.h"
#include "shared_state.h"

#include <memory>
#include <utility>

namespace weft::collectives {

// What a chunk has of the ranks' staging.
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

// What collectives of a group count together; equal on all ranks at the same point.
struct CollectiveCursor {
  Phases phases;
  uint64_t sequence = 0;  // collectives begun
  int buffer = 0;         // where the next one begins, or this one began
};

class Collective : public Operation {
 public:
  explicit Collective(CollectiveCall call) : call_(std::move(call)) {}

  // Goes on as far as possible; true when the result is there.
  // Errors: CollectiveMismatchError when the ranks' calls do not belong together.
  bool advance(const SharedState& shared, int rank, CollectiveCursor& cursor);

  uint64_t sequence() const { return head().sequence; }
  std::string describe() const override;

 protected:
  // Whether a whole buffer holds all of it: it takes that as one chunk, not half after half. The
  // same on all ranks whose calls belong together.
  virtual bool fits(size_t /*buffer_bytes*/) const { return false; }
  // Whether its chunks take the two buffers in turn, not halves of one: fewer waits, more memory
  // under way. REQUIRES: not combines(). The same on all ranks whose calls belong together.
  virtual bool takes_whole_buffers() const { return false; }
  // How many chunks of `staging_bytes` this rank needs; the largest of all counts.
  virtual int64_t num_chunks(size_t staging_bytes, int num_ranks) const = 0;
  virtual bool combines() const { return false; }
  virtual void fill(int64_t chunk, const Staging& staging) = 0;
  virtual void combine(int64_t /*chunk*/, const Staging& /*staging*/) {}
  virtual void drain(int64_t chunk, const Staging& staging) = 0;

  const CollectiveCall& call() const { return call_; }
  const SignatureHead& head() const { return call_.head; }

 private:
  void begin(const SharedState& shared, int rank, CollectiveCursor& cursor);
  Staging staging_of(int64_t chunk, const SharedState& shared, int rank, int first_buffer) const;
  int half_of(int64_t chunk, int first_buffer) const;
  void publish(const SharedState& shared, int rank) const;
  void compare(const SharedState& shared);

  CollectiveCall call_;
  int64_t step_ = 0;  // to be taken
  int64_t num_chunks_ = 0;
  bool is_whole_ = false;  // see fits()
};

using CollectivePtr = std::shared_ptr<Collective>;

// The text of a CollectiveMismatchError: `what` the ranks of a group brought.
std::string calls_misfit(const std::string& group, const std::string& what);

// The machine that carries out `call` on a rank.
CollectivePtr make_collective(CollectiveCall call, int rank);

}  // namespace weft::collectives
