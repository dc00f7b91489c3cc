#pragma once

// The transport as the threads of a group share it: thread-safe, with deadlines, and with one call
// that ends all waits.

#include "transport.h"

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

namespace weft::collectives {

using Deadline = std::chrono::steady_clock::time_point;

// A transfer failed. The text is that of the transport's error, except after give_up().
class TransportError : public std::runtime_error {
 public:
  TransportError(int peer_, const std::string& text) : std::runtime_error(text), peer(peer_) {}
  const int peer;  // kAnySource (-1) if unknown
};

class ThreadSafeTransport {
 public:
  explicit ThreadSafeTransport(std::unique_ptr<Transport> transport)
      : transport_(std::move(transport)) {}

  // Errors of send, receive and the waits: TransportError, also after give_up().
  std::unique_ptr<Transfer> send(int peer, int tag, const std::byte* data, size_t num_bytes);
  std::unique_ptr<Transfer> receive(int peer, int tag, std::byte* data, size_t num_bytes);
  void wait(Transfer& transfer, int peer, Deadline deadline);
  // Waits for a send. A transport may fail to report that the peer of a send is lost: gloo reports
  // nothing once the system has accepted the bytes. But gloo then rejects new transfers: see
  // probe().
  void wait_for_send(Transfer& transfer, int peer, Deadline deadline);

  // Call it periodically. For each peer with a send that a thread waits for, posts a receive and
  // cancels it at once; if the transport rejects the receive, ends the waits for sends to that
  // peer. Probes a peer at most once in kProbeInterval, because a cancelled receive may leave some
  // bytes with the transport.
  void probe();

  // Ends all current and future waits.
  void give_up();
  // Destroys the transport, which closes its connections: the other hosts detect that. REQUIRES:
  // give_up() was called, and no transfer is left.
  void close();

 private:
  static constexpr std::chrono::milliseconds kProbeInterval{1000};

  template <typename Post>
  std::unique_ptr<Transfer> post(int peer, const Post& post_it);
  bool accepts_transfers(int peer);

  std::mutex transport_mutex_;  // guards transport_
  std::unique_ptr<Transport> transport_;
  std::mutex mutex_;  // guards the members below
  std::set<Transfer*> waited_for_;
  std::map<Transfer*, int> sends_waited_for_;  // with their peers
  std::map<int, Deadline> next_probe_of_;      // by peer
  bool is_given_up_ = false;
};

// The transfers of one step of a collective, waited for together. Transfers of no bytes are not
// posted.
class TransferSet {
 public:
  // `publish_waiting` is called with the peer before each wait, and with -1 (no rank) after the
  // last wait.
  TransferSet(ThreadSafeTransport& transport,
              Deadline deadline,
              std::function<void(int)> publish_waiting)
      : transport_(transport), deadline_(deadline), publish_waiting_(std::move(publish_waiting)) {}

  void send(int peer, const std::byte* data, size_t num_bytes);
  void receive(int peer, std::byte* data, size_t num_bytes);
  void wait();

 private:
  struct PostedTransfer {
    int peer;
    std::unique_ptr<Transfer> transfer;
    bool is_send;
  };

  ThreadSafeTransport& transport_;
  const Deadline deadline_;
  const std::function<void(int)> publish_waiting_;
  std::vector<PostedTransfer> posted_;
};

}  // namespace weft::collectives
