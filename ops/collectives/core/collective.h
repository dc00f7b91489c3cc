#pragma once

// One collective as a machine that never waits: it goes on from where it stands whenever it is
// called, and stops where other ranks have not come yet.
//
// The tensors travel through the ranks' staging buffers a chunk at a time. For each chunk a rank
//   fills its own buffer, arrives, and when all have arrived
//   [combines into its own buffer, arrives, and when all have arrived]
//   drains the buffers into its result.
// Chunks alternate between two buffers: a rank fills buffer b again only after it saw everybody
// arrive for the chunk between, which they do after draining b. So it may fill the next buffer as
// soon as all have filled this one: while it waits for those that combine.

#include "call.h"
#include "operation.h"
#include "phases.h"
#include "shared_state.h"

#include <memory>
#include <utility>

namespace weft::collectives {

// The staging buffers of one chunk.
class Staging {
 public:
  Staging(const SharedState& shared, int rank, int buffer)
      : shared_(shared), rank_(rank), buffer_(buffer) {}

  std::byte* own() const { return of(rank_); }
  std::byte* of(int rank) const { return shared_.staging(rank, buffer_); }
  size_t num_bytes() const { return shared_.staging_bytes(); }
  int rank() const { return rank_; }
  int buffer() const { return buffer_; }
  int num_ranks() const { return shared_.num_ranks(); }

 private:
  SharedState shared_;
  int rank_;
  int buffer_;
};

// What collectives of a group count together; equal on all ranks at the same point.
struct CollectiveCursor {
  Phases phases;
  uint64_t sequence = 0;    // collectives begun
  uint64_t num_chunks = 0;  // chunks begun
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
  // How many chunks this rank needs with buffers of `staging_bytes`; the largest of all counts.
  virtual int64_t num_chunks(size_t staging_bytes, int num_ranks) const = 0;
  virtual bool combines() const { return false; }
  virtual void fill(int64_t chunk, const Staging& staging) = 0;
  virtual void combine(int64_t /*chunk*/, const Staging& /*staging*/) {}
  virtual void drain(int64_t chunk, const Staging& staging) = 0;

  const CollectiveCall& call() const { return call_; }
  const SignatureHead& head() const { return call_.head; }

 private:
  enum class Stage { kFill, kFilled, kCombined };

  void publish(const SharedState& shared, int rank) const;
  void compare(const SharedState& shared);

  CollectiveCall call_;
  Stage stage_ = Stage::kFill;
  bool is_filled_ahead_ = false;  // the chunk to come
  int64_t chunk_ = 0;
  int64_t num_chunks_ = 0;
};

using CollectivePtr = std::shared_ptr<Collective>;

// The text of a CollectiveMismatchError: `what` the ranks of a group brought.
std::string calls_misfit(const std::string& group, const std::string& what);

// The machine that carries out `call` on a rank.
CollectivePtr make_collective(CollectiveCall call, int rank);

}  // namespace weft::collectives
