#include "nccl_wire.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <poll.h>
#include <set>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <utility>

namespace weft::cuda_runtime {

// The bytes of one message that are still to be moved.
struct Progress {
  int peer = 0;
  bool is_outgoing = false;
  std::vector<char> header = {};       // what was received, for an incoming message
  const Transfer* transfer = nullptr;  // none: a confirmation, one byte without a header
  std::size_t num_moved = 0;           // of header and content
  char confirmation = 1;

  std::size_t num_bytes() const {
    return transfer == nullptr ? 1 : header.size() + transfer->num_bytes;
  }
  bool is_done() const { return num_moved == num_bytes(); }

  // Returns the next contiguous bytes to be moved.
  std::pair<char*, std::size_t> next() {
    if (transfer == nullptr) return {&confirmation, 1};
    if (num_moved < header.size()) return {header.data() + num_moved, header.size() - num_moved};
    return {static_cast<char*>(transfer->bytes) + (num_moved - header.size()),
            num_bytes() - num_moved};
  }
};

namespace {

constexpr std::chrono::seconds kConnectTimeout{60};
constexpr int kPollMs = 20;
constexpr std::size_t kNameBytes = 96;

sockaddr_un address_of(const std::string& id, int rank, socklen_t& num_bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // The first byte is zero: an abstract name, which needs no file and ends with its socket.
  const std::string name = "weft-nccl-" + id + "-" + std::to_string(rank);
  std::memcpy(
      address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::vector<char> header_of(const Transfer& transfer) {
  std::vector<char> result(kNameBytes);
  const std::string text = transfer.name + ", " + std::to_string(transfer.num_bytes) + " bytes";
  std::copy_n(text.begin(), std::min(text.size(), kNameBytes - 1), result.begin());
  return result;
}

[[noreturn]] void fail(const std::string& problem) {
  throw std::runtime_error("NCCL without a device: " + problem);
}

}  // namespace

Wire::Wire(const std::string& id, int rank, int num_ranks)
    : rank_(rank), sockets_(static_cast<std::size_t>(num_ranks), -1) {
  const int listener = listen_as(id);
  const auto deadline = std::chrono::steady_clock::now() + kConnectTimeout;
  for (int peer = 0; peer < rank; ++peer) {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t size = 0;
    const sockaddr_un address = address_of(id, peer, size);
    while (connect(socket, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        fail("rank " + std::to_string(peer) + " did not join the communicator");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (write(socket, &rank, sizeof rank) != sizeof rank) fail("the handshake failed");
    sockets_[static_cast<std::size_t>(peer)] = socket;
  }
  for (int i = rank + 1; i < num_ranks; ++i) {
    pollfd waiting{.fd = listener, .events = POLLIN, .revents = 0};
    if (poll(&waiting, 1, static_cast<int>(kConnectTimeout / std::chrono::milliseconds(1))) <= 0) {
      fail("a rank above " + std::to_string(rank) + " did not join the communicator");
    }
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    int peer = -1;
    if (read(socket, &peer, sizeof peer) != sizeof peer) fail("the handshake failed");
    sockets_.at(static_cast<std::size_t>(peer)) = socket;
  }
  close(listener);
}

Wire::~Wire() {
  for (const int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

int Wire::listen_as(const std::string& id) const {
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t size = 0;
  const sockaddr_un address = address_of(id, rank_, size);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener, static_cast<int>(sockets_.size())) != 0) {
    fail("rank " + std::to_string(rank_) + " cannot listen: " + std::strerror(errno));
  }
  return listener;
}

// Moves bytes until all messages are done. Messages of one peer and direction follow each other.
void Wire::progress(std::vector<Progress>& all) {
  while (true) {
    std::vector<pollfd> waiting;
    std::vector<Progress*> owners;
    std::set<std::pair<int, bool>> busy;
    for (Progress& each : all) {
      if (each.is_done() || !busy.insert({each.peer, each.is_outgoing}).second) continue;
      waiting.push_back({.fd = sockets_.at(static_cast<std::size_t>(each.peer)),
                         .events = static_cast<short>(each.is_outgoing ? POLLOUT : POLLIN),
                         .revents = 0});
      owners.push_back(&each);
    }
    if (waiting.empty()) return;
    if (is_aborted_) throw Aborted("NCCL without a device: the communicator was aborted");
    if (poll(waiting.data(), waiting.size(), kPollMs) <= 0) continue;
    bool has_moved = false;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) has_moved |= move_bytes(*owners[i], waiting[i].fd);
    }
    // A peer that has ended leaves its socket ready.
    if (!has_moved) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Wire::move_bytes(Progress& message, int socket) const {
  const auto [bytes, size] = message.next();
  const ssize_t moved = message.is_outgoing ? send(socket, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL)
                                            : recv(socket, bytes, size, MSG_DONTWAIT);
  if (moved <= 0) return false;
  message.num_moved += static_cast<std::size_t>(moved);
  if (message.transfer == nullptr || message.is_outgoing) return true;
  const std::vector<char> expected = header_of(*message.transfer);
  if (message.num_moved >= expected.size() && message.header != expected) {
    fail("rank " + std::to_string(rank_) + " calls " + expected.data() + ", and rank " +
         std::to_string(message.peer) + " calls " + message.header.data());
  }
  return true;
}

// First all messages, then all confirmations, so that each socket carries them in one order.
void Wire::exchange(const std::vector<Transfer>& sent, const std::vector<Transfer>& received) {
  std::vector<Progress> messages, confirmations;
  std::vector<const Transfer*> to_self, from_self;
  for (const Transfer& each : sent) {
    if (each.peer == rank_) {
      to_self.push_back(&each);
      continue;
    }
    messages.push_back({each.peer, true, header_of(each), &each});
    confirmations.push_back({.peer = each.peer, .is_outgoing = false});
  }
  for (const Transfer& each : received) {
    if (each.peer == rank_) {
      from_self.push_back(&each);
      continue;
    }
    messages.push_back({each.peer, false, std::vector<char>(kNameBytes), &each});
    confirmations.push_back({.peer = each.peer, .is_outgoing = true});
  }
  if (to_self.size() != from_self.size()) fail("a rank sends to itself what it does not receive");
  for (std::size_t i = 0; i < to_self.size(); ++i) {
    if (header_of(*to_self[i]) != header_of(*from_self[i])) {
      fail("a rank sends to itself " + std::string(header_of(*to_self[i]).data()) +
           ", and receives " + header_of(*from_self[i]).data());
    }
    std::memmove(from_self[i]->bytes, to_self[i]->bytes, to_self[i]->num_bytes);
  }
  progress(messages);
  progress(confirmations);
}

}  // namespace weft::cuda_runtime
