#pragma once

// Point-to-point messages in a multi-host group. A message begins with a header of a fixed size,
// which holds the message's size and dtype and, if it fits, its data (eager). Larger data follows
// under a tag that the header names: the receiver posts the receive for the data after it has
// checked size and dtype. All messages use the transport, also within a host, so that a receive
// from any source waits in one place.

#include "messages.h"
#include "thread_safe_transport.h"

#include <array>
#include <atomic>
#include <vector>

namespace weft::collectives {

class RemoteMessages {
 public:
  RemoteMessages(ThreadSafeTransport& transport, int rank, int num_ranks)
      : transport_(transport), rank_(rank), num_sent_(static_cast<size_t>(num_ranks)) {}

  // A message whose transfers have been posted; finish() blocks.
  class PostedMessage;
  // Posts the transfers of a message. Messages keep the order of these calls. Errors:
  // TransportError; std::invalid_argument for a tag out of range.
  std::shared_ptr<PostedMessage> post(const MessagePtr& message);
  // Waits until the message is sent or received. Errors: CollectiveMismatchError if a receive and
  // its message do not match; TransportError.
  void finish(PostedMessage& posted, Deadline deadline);

 private:
  ThreadSafeTransport& transport_;
  const int rank_;
  std::vector<std::atomic<uint64_t>> num_sent_;  // by peer
};

struct MessageHeader {
  uint64_t num_bytes = 0;
  int32_t data_tag = 0;
  DType dtype = DType::kUInt8;
};

class RemoteMessages::PostedMessage {
 public:
  static constexpr size_t kHeaderBytes = 1024;  // a MessageHeader and eager data
  static constexpr size_t kEagerBytes = kHeaderBytes - sizeof(MessageHeader);

  MessagePtr message;
  std::array<std::byte, kHeaderBytes> header{};
  // NOTE: declared last, to be destroyed before the memory above.
  std::unique_ptr<Transfer> header_transfer;
  std::unique_ptr<Transfer> data_transfer;
};

}  // namespace weft::collectives
