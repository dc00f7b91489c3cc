#include "remote_messages.h"

#include "tags.h"

#include <cstring>
#include <string>

namespace weft::collectives {

std::shared_ptr<RemoteMessages::Posted> RemoteMessages::post(const MessagePtr& message) {
  if (message->tag < 0 || message->tag > kMaxUserTag) {
    throw std::invalid_argument("weft: got tag " + std::to_string(message->tag) +
                                " in a group of several hosts; pass one from 0 to " +
                                std::to_string(kMaxUserTag));
  }
  auto posted = std::make_shared<Posted>();
  posted->message = message;
  const int tag = head_tag(message->tag);
  if (message->direction == Message::Direction::kReceive) {
    posted->head_transfer =
        transport_.receive(message->peer, tag, posted->head.data(), Posted::kHeadBytes);
    return posted;
  }
  const uint64_t num_bytes = message->num_bytes();
  const bool is_eager = num_bytes <= Posted::kEagerBytes;
  const int tag_of_data = data_tag(num_sent_[static_cast<size_t>(message->peer)]++);
  const MessageHead head{num_bytes, tag_of_data, message->dtype};
  std::memcpy(posted->head.data(), &head, sizeof head);
  if (is_eager && num_bytes > 0) {
    std::memcpy(posted->head.data() + sizeof head, message->data, num_bytes);
  }
  posted->head_transfer =
      transport_.send(message->peer, tag, posted->head.data(), Posted::kHeadBytes);
  if (!is_eager) {
    posted->data_transfer = transport_.send(message->peer, tag_of_data, message->data, num_bytes);
  }
  return posted;
}

void RemoteMessages::finish(Posted& posted, Deadline deadline) {
  Message& message = *posted.message;
  const bool is_send = message.direction == Message::Direction::kSend;
  const auto wait = [&](Transfer& transfer) {
    if (is_send) {
      transport_.wait_for_send(transfer, message.peer, deadline);
    } else {
      transport_.wait(transfer, message.peer, deadline);
    }
  };
  wait(*posted.head_transfer);
  if (!is_send) {
    const int source = posted.head_transfer->source();
    MessageHead head;
    std::memcpy(&head, posted.head.data(), sizeof head);
    check_matches(message, source, head.dtype, head.num_bytes, rank_);
    message.peer = source;
    if (head.num_bytes > Posted::kEagerBytes) {
      posted.data_transfer =
          transport_.receive(source, head.data_tag, message.data, head.num_bytes);
    } else if (head.num_bytes > 0) {
      std::memcpy(message.data, posted.head.data() + sizeof head, head.num_bytes);
    }
  }
  if (posted.data_transfer) wait(*posted.data_transfer);
}

}  // namespace weft::collectives
