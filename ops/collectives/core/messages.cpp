#include "messages.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace weft::collectives {

namespace {

// Messages up to this size are eager: sent with their announcement.
constexpr uint64_t kEagerBytes = 4096 - sizeof(FrameHeader);

}  // namespace

Message::Message(Direction direction_,
                 int peer_,
                 int tag_,
                 DType dtype_,
                 int64_t num_elements_,
                 std::byte* data_)
    : direction(direction_),
      peer(peer_),
      tag(tag_),
      dtype(dtype_),
      num_elements(num_elements_),
      data(data_) {}

std::string Message::describe() const {
  std::ostringstream text;
  text << (direction == Direction::kSend ? "send(" : "recv(") << name_of(dtype) << ' '
       << num_elements << (num_elements == 1 ? " element" : " elements");
  if (direction == Direction::kSend) {
    text << " to rank " << peer;
  } else if (peer == kAnySource) {
    text << " from any rank";
  } else {
    text << " from rank " << peer;
  }
  text << ", tag " << tag << ')';
  return text.str();
}

void check_matches(const Message& receive, int from, DType dtype, uint64_t num_bytes, int rank) {
  if (num_bytes == receive.num_bytes() && dtype == receive.dtype) return;
  std::ostringstream text;
  text << "rank " << from << " sent " << name_of(dtype) << ' ' << num_bytes / size_of(dtype)
       << " elements with tag " << receive.tag << " where rank " << rank << " called "
       << receive.describe();
  throw CollectiveMismatchError(text.str());
}

Messages::Messages(const SharedState& shared, int rank)
    : shared_(shared), rank_(rank), queues_(static_cast<size_t>(shared.num_ranks())) {}

void Messages::post(MessagePtr message) {
  ++num_pending_;
  if (message->direction == Message::Direction::kReceive) {
    receives_.push_back(std::move(message));
    needs_matching_ = true;
    return;
  }
  PeerQueues& queues = queues_[static_cast<size_t>(message->peer)];
  message->id_ = queues.num_sends++;
  queues.to_announce.push_back(std::move(message));
}

bool Messages::advance(std::vector<MessagePtr>& ended) {
  if (is_idle()) return false;
  bool moved = false;
  for (int peer = 0; peer < shared_.num_ranks(); ++peer) {
    if (peer != rank_) moved |= read_from(peer, ended);
  }
  if (std::exchange(needs_matching_, false)) match(ended);
  for (int peer = 0; peer < shared_.num_ranks(); ++peer) {
    if (peer != rank_) moved |= write_to(peer, ended);
  }
  return moved || !ended.empty();
}

bool Messages::read_from(int peer, std::vector<MessagePtr>& ended) {
  RingEnd ring(shared_, peer, rank_);
  if (ring.is_empty()) return false;
  PeerQueues& queues = queues_[static_cast<size_t>(peer)];
  do {
    const FrameHeader header = ring.front();
    switch (header.kind) {
      case FrameKind::kAnnounce: {
        Announcement& message = announcements_.emplace_back(Announcement{peer, header, {}});
        message.payload.resize(header.payload_bytes);
        ring.read_payload(message.payload.data());
        needs_matching_ = true;
        break;
      }
      case FrameKind::kGrant: {
        auto found = queues.awaiting_grant.find(header.message_id);
        queues.granted.push_back(std::move(found->second));
        queues.awaiting_grant.erase(found);
        break;
      }
      case FrameKind::kData: {
        const auto found = queues.incoming.find(header.message_id);
        const MessagePtr receive = found->second;
        ring.read_payload(receive->data + receive->num_moved_);
        receive->num_moved_ += header.payload_bytes;
        if (receive->num_moved_ == receive->num_bytes()) {
          queues.incoming.erase(found);
          end(receive, ended);
        }
        break;
      }
    }
    ring.pop();
  } while (!ring.is_empty());
  shared_.rank(peer).doorbell.ring();  // the ring has space again
  return true;
}

bool Messages::write_to(int peer, std::vector<MessagePtr>& ended) {
  PeerQueues& queues = queues_[static_cast<size_t>(peer)];
  if (queues.grants.empty() && queues.granted.empty() && queues.to_announce.empty()) return false;
  RingEnd ring(shared_, rank_, peer);
  bool wrote = false;
  while (!queues.grants.empty() && ring.space() >= 0) {
    ring.write(queues.grants.front(), nullptr);
    queues.grants.pop_front();
    wrote = true;
  }
  while (!queues.to_announce.empty()) {
    const MessagePtr message = queues.to_announce.front();
    const bool is_eager = message->num_bytes() <= kEagerBytes;
    const uint64_t payload = is_eager ? message->num_bytes() : 0;
    if (ring.space() < static_cast<int64_t>(payload)) break;
    ring.write({FrameKind::kAnnounce,
                message->dtype,
                /*unused=*/0,
                message->tag,
                message->id_,
                message->num_bytes(),
                payload},
               message->data);
    queues.to_announce.pop_front();
    wrote = true;
    if (is_eager) {
      end(message, ended);
    } else {
      queues.awaiting_grant.emplace(message->id_, message);
    }
  }
  // Chunks of a quarter of the ring, so that the peer reads one while this rank writes the next.
  const auto chunk_bytes = static_cast<int64_t>(shared_.ring_bytes() / 4 - sizeof(FrameHeader));
  while (!queues.granted.empty()) {
    const MessagePtr message = queues.granted.front();
    const auto remaining = static_cast<int64_t>(message->num_bytes() - message->num_moved_);
    const int64_t payload = std::min(remaining, chunk_bytes);
    if (ring.space() < payload) break;
    ring.write({FrameKind::kData,
                message->dtype,
                /*unused=*/0,
                message->tag,
                message->id_,
                message->num_bytes(),
                static_cast<uint64_t>(payload)},
               message->data + message->num_moved_);
    shared_.rank(peer).doorbell.ring();
    message->num_moved_ += static_cast<uint64_t>(payload);
    wrote = true;
    if (payload == remaining) {
      queues.granted.pop_front();
      end(message, ended);
    }
  }
  if (wrote) shared_.rank(peer).doorbell.ring();
  return wrote;
}

void Messages::match(std::vector<MessagePtr>& ended) {
  for (auto receive = receives_.begin(); receive != receives_.end();) {
    const auto found = std::ranges::find_if(announcements_, [&](const Announcement& message) {
      return ((*receive)->peer == kAnySource || (*receive)->peer == message.from) &&
             (*receive)->tag == message.header.tag;
    });
    if (found == announcements_.end()) {
      ++receive;
      continue;
    }
    accept(*receive, *found, ended);
    announcements_.erase(found);
    receive = receives_.erase(receive);
  }
}

void Messages::accept(const MessagePtr& receive,
                      Announcement& message,
                      std::vector<MessagePtr>& ended) {
  const FrameHeader& header = message.header;
  check_matches(*receive, message.from, header.dtype, header.message_bytes, rank_);
  receive->peer = message.from;
  if (message.payload.size() == header.message_bytes) {
    if (!message.payload.empty()) {
      std::memcpy(receive->data, message.payload.data(), message.payload.size());
    }
    return end(receive, ended);
  }
  PeerQueues& queues = queues_[static_cast<size_t>(message.from)];
  queues.incoming.emplace(header.message_id, receive);
  queues.grants.push_back({FrameKind::kGrant,
                           header.dtype,
                           /*unused=*/0,
                           header.tag,
                           header.message_id,
                           header.message_bytes,
                           /*payload_bytes=*/0});
}

void Messages::end(const MessagePtr& message, std::vector<MessagePtr>& ended) {
  --num_pending_;
  ended.push_back(message);
}

std::vector<MessagePtr> Messages::take_all() {
  std::vector<MessagePtr> all(receives_.begin(), receives_.end());
  for (PeerQueues& queues : queues_) {
    all.insert(all.end(), queues.to_announce.begin(), queues.to_announce.end());
    all.insert(all.end(), queues.granted.begin(), queues.granted.end());
    for (const auto& [id, message] : queues.awaiting_grant) all.push_back(message);
    for (const auto& [id, message] : queues.incoming) all.push_back(message);
    queues = {};
  }
  receives_.clear();
  announcements_.clear();
  num_pending_ = 0;
  return all;
}

bool Messages::needs(int peer) const {
  const PeerQueues& queues = queues_[static_cast<size_t>(peer)];
  if (!queues.to_announce.empty() || !queues.awaiting_grant.empty() || !queues.granted.empty() ||
      !queues.incoming.empty()) {
    return true;
  }
  return std::ranges::any_of(receives_,
                             [&](const MessagePtr& receive) { return receive->peer == peer; });
}

bool Messages::needs_any_source() const {
  return std::ranges::any_of(
      receives_, [&](const MessagePtr& receive) { return receive->peer == kAnySource; });
}

MessagePtr Messages::find_late(std::chrono::steady_clock::time_point now) const {
  const auto is_late = [&](const MessagePtr& message) { return message->deadline.load() <= now; };
  for (const MessagePtr& receive : receives_) {
    if (is_late(receive)) return receive;
  }
  for (const PeerQueues& queues : queues_) {
    for (const auto* queue : {&queues.to_announce, &queues.granted}) {
      const auto found = std::ranges::find_if(*queue, is_late);
      if (found != queue->end()) return *found;
    }
    for (const auto* waiting : {&queues.awaiting_grant, &queues.incoming}) {
      for (const auto& [id, message] : *waiting) {
        if (is_late(message)) return message;
      }
    }
  }
  return nullptr;
}

}  // namespace weft::collectives
