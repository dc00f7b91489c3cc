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

#include "operation.h"
#include "phases.h"
#include "shared_state.h"

#include <memory>
#include <vector>

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
  // The head's sequence and num_chunks are filled in by advance(). `gives` and `expects` are empty
  // or hold one count per rank.
  Collective(SignatureHead head, std::vector<int64_t> gives, std::vector<int64_t> expects);

  // Goes on as far as possible; true when the result is there.
  // Errors: CollectiveMismatchError when the ranks' calls do not belong together.
  bool advance(const SharedState& shared, int rank, CollectiveCursor& cursor);

  uint64_t sequence() const { return head_.sequence; }
  std::string describe() const override;

 protected:
  // How many chunks this rank needs with buffers of `staging_bytes`; the largest of all counts.
  virtual int64_t num_chunks(size_t staging_bytes, int num_ranks) const = 0;
  virtual bool combines() const { return false; }
  virtual void fill(int64_t chunk, const Staging& staging) = 0;
  virtual void combine(int64_t /*chunk*/, const Staging& /*staging*/) {}
  virtual void drain(int64_t chunk, const Staging& staging) = 0;

  const SignatureHead& head() const { return head_; }

 private:
  enum class Stage { kFill, kFilled, kCombined };

  void publish(const SharedState& shared, int rank) const;
  void compare(const SharedState& shared);

  SignatureHead head_;
  std::vector<int64_t> gives_;
  std::vector<int64_t> expects_;
  Stage stage_ = Stage::kFill;
  bool is_filled_ahead_ = false;  // the chunk to come
  int64_t chunk_ = 0;
  int64_t num_chunks_ = 0;
};

using CollectivePtr = std::shared_ptr<Collective>;

}  // namespace weft::collectives
