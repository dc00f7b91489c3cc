#include "thread_safe_transport.h"

#include "tags.h"

#include <algorithm>

namespace weft::collectives {

template <typename Post>
std::unique_ptr<Transfer> ThreadSafeTransport::post(int peer, const Post& post_it) {
  const std::lock_guard lock(transport_mutex_);
  {
    const std::lock_guard state(mutex_);
    if (is_given_up_) throw TransportError(peer, "the group has failed, or this rank has left it");
  }
  try {
    return post_it();
  } catch (const std::exception& error) {
    throw TransportError(peer, error.what());
  }
}

std::unique_ptr<Transfer> ThreadSafeTransport::send(int peer,
                                                    int tag,
                                                    const std::byte* data,
                                                    size_t num_bytes) {
  return post(peer, [&] { return transport_->send(peer, tag, data, num_bytes); });
}

std::unique_ptr<Transfer> ThreadSafeTransport::receive(int peer,
                                                       int tag,
                                                       std::byte* data,
                                                       size_t num_bytes) {
  return post(peer, [&] { return transport_->receive(peer, tag, data, num_bytes); });
}

void ThreadSafeTransport::wait(Transfer& transfer, int peer, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (is_given_up_) throw TransportError(peer, "the group has failed, or this rank has left it");
    waited_for_.insert(&transfer);
  }
  const auto forget = [&] {
    const std::lock_guard lock(mutex_);
    waited_for_.erase(&transfer);
  };
  const auto remaining =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  try {
    transfer.wait(std::max(remaining, std::chrono::milliseconds(1)));
  } catch (const std::exception& error) {
    forget();
    throw TransportError(peer, error.what());
  }
  forget();
}

void ThreadSafeTransport::wait_for_send(Transfer& transfer, int peer, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    sends_waited_for_.emplace(&transfer, peer);
    next_probe_of_.try_emplace(peer, std::chrono::steady_clock::now() + kProbeInterval / 10);
  }
  const auto forget = [&] {
    const std::lock_guard lock(mutex_);
    sends_waited_for_.erase(&transfer);
  };
  try {
    wait(transfer, peer, deadline);
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

void ThreadSafeTransport::probe() {
  std::set<int> due;
  {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    for (const auto& [transfer, peer] : sends_waited_for_) {
      if (next_probe_of_.at(peer) <= now) due.insert(peer);
    }
    for (const int peer : due) next_probe_of_.at(peer) = now + kProbeInterval;
  }
  for (const int peer : due) {
    if (accepts_transfers(peer)) continue;
    const std::lock_guard lock(mutex_);
    for (const auto& [transfer, to] : sends_waited_for_) {
      if (to == peer) transfer->give_up();
    }
  }
}

bool ThreadSafeTransport::accepts_transfers(int peer) {
  static std::byte never_written{};
  try {
    // Posted and destroyed under the lock, before close() can end the transport.
    post(peer, [&] {
      transport_->receive(peer, kProbeTag, &never_written, 1)->give_up();
      return std::unique_ptr<Transfer>();
    });
    return true;
  } catch (const TransportError&) {
    return false;
  }
}

void ThreadSafeTransport::give_up() {
  const std::lock_guard lock(mutex_);
  is_given_up_ = true;
  for (Transfer* transfer : waited_for_) transfer->give_up();
}

void ThreadSafeTransport::close() {
  const std::lock_guard lock(transport_mutex_);
  transport_.reset();
}

void TransferSet::send(int peer, const std::byte* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  posted_.push_back({peer, transport_.send(peer, kCollectiveTag, data, num_bytes), true});
}

void TransferSet::receive(int peer, std::byte* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  posted_.push_back({peer, transport_.receive(peer, kCollectiveTag, data, num_bytes), false});
}

void TransferSet::wait() {
  for (const PostedTransfer& each : posted_) {
    publish_waiting_(each.peer);
    if (each.is_send) {
      transport_.wait_for_send(*each.transfer, each.peer, deadline_);
    } else {
      transport_.wait(*each.transfer, each.peer, deadline_);
    }
  }
  posted_.clear();
  publish_waiting_(-1);
}

}  // namespace weft::collectives
