#include "remote_messages.h"

#include "tags.h"

#include <cstring>
#include <string>

namespace weft::collectives {

std::shared_ptr<RemoteMessages::PostedMessage> RemoteMessages::post(const MessagePtr& message) {
  if (message->tag < 0 || message->tag > kMaxUserTag) {
    throw std::invalid_argument("weft: got tag " + std::to_string(message->tag) +
                                " in a multi-host group; pass one from 0 to " +
                                std::to_string(kMaxUserTag));
  }
  auto posted = std::make_shared<PostedMessage>();
  posted->message = message;
  const int tag = header_tag(message->tag);
  if (message->direction == Message::Direction::kReceive) {
    posted->header_transfer =
        transport_.receive(message->peer, tag, posted->header.data(), PostedMessage::kHeaderBytes);
    return posted;
  }
  const uint64_t num_bytes = message->num_bytes();
  const bool is_eager = num_bytes <= PostedMessage::kEagerBytes;
  const int tag_of_data = data_tag(num_sent_[static_cast<size_t>(message->peer)]++);
  const MessageHeader header{num_bytes, tag_of_data, message->dtype};
  std::memcpy(posted->header.data(), &header, sizeof header);
  if (is_eager && num_bytes > 0) {
    std::memcpy(posted->header.data() + sizeof header, message->data, num_bytes);
  }
  posted->header_transfer =
      transport_.send(message->peer, tag, posted->header.data(), PostedMessage::kHeaderBytes);
  if (!is_eager) {
    posted->data_transfer = transport_.send(message->peer, tag_of_data, message->data, num_bytes);
  }
  return posted;
}

void RemoteMessages::finish(PostedMessage& posted, Deadline deadline) {
  Message& message = *posted.message;
  const bool is_send = message.direction == Message::Direction::kSend;
  const auto wait = [&](Transfer& transfer) {
    if (is_send) {
      transport_.wait_for_send(transfer, message.peer, deadline);
    } else {
      transport_.wait(transfer, message.peer, deadline);
    }
  };
  wait(*posted.header_transfer);
  if (!is_send) {
    const int source = posted.header_transfer->source();
    MessageHeader header;
    std::memcpy(&header, posted.header.data(), sizeof header);
    check_matches(message, source, header.dtype, header.num_bytes, rank_);
    message.peer = source;
    if (header.num_bytes > PostedMessage::kEagerBytes) {
      posted.data_transfer =
          transport_.receive(source, header.data_tag, message.data, header.num_bytes);
    } else if (header.num_bytes > 0) {
      std::memcpy(message.data, posted.header.data() + sizeof header, header.num_bytes);
    }
  }
  if (posted.data_transfer) wait(*posted.data_transfer);
}

}  // namespace weft::collectives
