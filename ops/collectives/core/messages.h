#pragma once

// Point-to-point messages within a host. A sender announces each message through the ring to its
// receiver. A small message is eager: its data is sent with the announcement, and the receiver
// stores the data until a receive matches. A larger message waits until a receive matches and the
// receiver grants it; its data then passes through the ring in chunks to its destination. Therefore
// a large message needs no memory beyond the ring, and sends and receives in any order on both
// sides do not deadlock. Messages of one sender, receiver and tag keep their order.

#include "operation.h"
#include "ring.h"
#include "shared_state.h"

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

namespace weft::collectives {

constexpr int kAnySource = -1;

class Message : public Operation {
 public:
  enum class Direction { kSend, kReceive };
  // data: read by a send, written by a receive; must stay valid until the operation is done.
  Message(
      Direction direction, int peer, int tag, DType dtype, int64_t num_elements, std::byte* data);

  std::string describe() const override;
  // The source rank of a receive; for a receive from any source, set once it has matched.
  int source() const { return peer; }

  const Direction direction;
  int peer;  // of a receive from any source: kAnySource until it has matched
  const int tag;
  const DType dtype;
  const int64_t num_elements;
  std::byte* const data;

  uint64_t num_bytes() const { return static_cast<uint64_t>(num_elements) * size_of(dtype); }

 private:
  friend class Messages;
  uint64_t id_ = 0;
  uint64_t num_moved_ = 0;  // bytes streamed so far
};

using MessagePtr = std::shared_ptr<Message>;

// Throws CollectiveMismatchError unless the size and dtype of a message from rank `from` are those
// of `receive`, which rank `rank` has posted.
void check_matches(const Message& receive, int from, DType dtype, uint64_t num_bytes, int rank);

// All messages of one rank. Thread safety: one thread at a time, the driver of the engine.
class Messages {
 public:
  Messages(const SharedState& shared, int rank);

  void post(MessagePtr message);
  bool is_idle() const { return num_pending_ == 0; }
  // Makes all possible progress and appends the messages that are done to `ended`. Returns whether
  // there was any progress.
  // Errors: CollectiveMismatchError when a receive matches a message of another size or dtype.
  bool advance(std::vector<MessagePtr>& ended);
  // Removes and returns all pending messages.
  std::vector<MessagePtr> take_all();
  // Whether a pending message waits for `peer`.
  bool needs(int peer) const;
  // Whether a receive from any source has not matched yet: a message from any other rank may match
  // it.
  bool needs_any_source() const;
  // Returns a message whose deadline has passed, or null.
  MessagePtr find_late(std::chrono::steady_clock::time_point now) const;

 private:
  struct Announcement {
    int from;
    FrameHeader header;
    std::vector<std::byte> payload;  // the data of an eager message
  };
  struct PeerQueues {
    std::deque<MessagePtr> to_announce;
    std::map<uint64_t, MessagePtr> awaiting_grant;  // sends that are announced, by message id
    std::deque<MessagePtr> granted;                 // sends being streamed
    std::deque<FrameHeader> grants;                 // to be sent to the peer
    std::map<uint64_t, MessagePtr> incoming;        // receives being streamed, by message id
    uint64_t num_sends = 0;                         // posted so far
  };

  bool read_from(int peer, std::vector<MessagePtr>& ended);
  bool write_to(int peer, std::vector<MessagePtr>& ended);
  void match(std::vector<MessagePtr>& ended);
  void accept(const MessagePtr& receive, Announcement& message, std::vector<MessagePtr>& ended);
  void end(const MessagePtr& message, std::vector<MessagePtr>& ended);

  SharedState shared_;
  int rank_;
  std::vector<PeerQueues> queues_;         // by peer
  std::list<MessagePtr> receives_;         // posted and not matched, in order
  std::list<Announcement> announcements_;  // received and not matched, in order
  size_t num_pending_ = 0;
  bool needs_matching_ = false;  // a receive or an announcement was added since match()
};

}  // namespace weft::collectives
