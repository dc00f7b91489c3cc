#include "remote.h"

#include "tags.h"

#include <algorithm>

namespace weft::collectives {

template <typename Post>
std::unique_ptr<Transfer> Remote::post(int peer, const Post& post_it) {
  const std::lock_guard lock(posting_);
  {
    const std::lock_guard state(mutex_);
    if (is_given_up_) throw TransportError(peer, "the group is over");
  }
  try {
    return post_it();
  } catch (const std::exception& error) {
    throw TransportError(peer, error.what());
  }
}

std::unique_ptr<Transfer> Remote::send(int peer, int tag, const std::byte* data, size_t num_bytes) {
  return post(peer, [&] { return transport_->send(peer, tag, data, num_bytes); });
}

std::unique_ptr<Transfer> Remote::receive(int peer, int tag, std::byte* data, size_t num_bytes) {
  return post(peer, [&] { return transport_->receive(peer, tag, data, num_bytes); });
}

void Remote::wait(Transfer& transfer, int peer, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (is_given_up_) throw TransportError(peer, "the group is over");
    waited_for_.insert(&transfer);
  }
  const auto forget = [&] {
    const std::lock_guard lock(mutex_);
    waited_for_.erase(&transfer);
  };
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  try {
    transfer.wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (const std::exception& error) {
    forget();
    throw TransportError(peer, error.what());
  }
  forget();
}

void Remote::give_up() {
  const std::lock_guard lock(mutex_);
  is_given_up_ = true;
  for (Transfer* transfer : waited_for_) transfer->give_up();
}

void Remote::close() {
  const std::lock_guard lock(posting_);
  transport_.reset();
}

void Transfers::send(int peer, const std::byte* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  posted_.push_back({peer, remote_.send(peer, kCollectiveTag, data, num_bytes)});
}

void Transfers::receive(int peer, std::byte* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  posted_.push_back({peer, remote_.receive(peer, kCollectiveTag, data, num_bytes)});
}

void Transfers::wait() {
  for (const Posted& each : posted_) {
    tell_waiting_(each.peer);
    remote_.wait(*each.transfer, each.peer, deadline_);
  }
  posted_.clear();
  tell_waiting_(-1);
}

}  // namespace weft::collectives
