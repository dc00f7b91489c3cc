#pragma once

// The transport as the parts of a group share it: from several threads, with deadlines, and given
// up as a whole.

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

// A transfer failed; what the transport said.
class TransportError : public std::runtime_error {
 public:
  TransportError(int peer_, const std::string& text) : std::runtime_error(text), peer(peer_) {}
  const int peer;  // kAnySource where it is not known
};

class Remote {
 public:
  explicit Remote(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  // Errors, of all: TransportError, also after give_up().
  std::unique_ptr<Transfer> send(int peer, int tag, const std::byte* data, size_t num_bytes);
  std::unique_ptr<Transfer> receive(int peer, int tag, std::byte* data, size_t num_bytes);
  void wait(Transfer& transfer, int peer, Deadline deadline);
  // The same of a send. A transport may not say that the peer of a send was lost, which gloo does
  // not where bytes were given to the system; but it takes no more for that peer. See probe().
  void wait_for_send(Transfer& transfer, int peer, Deadline deadline);

  // Ends the waits for sends to peers that the transport takes nothing for any more. To be called
  // now and then; asks for each peer at most once in kProbeInterval, as a receive that is given up
  // may leave some bytes with the transport.
  void probe();

  // Ends every wait, now and later.
  void give_up();
  // Ends the transport, which tells the other hosts. REQUIRES: given up, and no transfer is left.
  void close();

 private:
  static constexpr std::chrono::milliseconds kProbeInterval{1000};

  template <typename Post>
  std::unique_ptr<Transfer> post(int peer, const Post& post_it);
  bool takes_more_for(int peer);

  std::mutex posting_;
  std::unique_ptr<Transport> transport_;
  std::mutex mutex_;
  std::set<Transfer*> waited_for_;
  std::map<Transfer*, int> sends_waited_for_;  // and their peers
  std::map<int, Deadline> next_probe_of_;      // by peer
  bool is_given_up_ = false;
};

// Transfers of one step of a collective, waited for together. Nothing travels for no bytes.
class Transfers {
 public:
  // `tell_waiting` is called with the peer of each wait, and with -1 when all are over.
  Transfers(Remote& remote, Deadline deadline, std::function<void(int)> tell_waiting)
      : remote_(remote), deadline_(deadline), tell_waiting_(std::move(tell_waiting)) {}

  void send(int peer, const std::byte* data, size_t num_bytes);
  void receive(int peer, std::byte* data, size_t num_bytes);
  void wait();

 private:
  struct Posted {
    int peer;
    std::unique_ptr<Transfer> transfer;
    bool is_send;
  };

  Remote& remote_;
  const Deadline deadline_;
  const std::function<void(int)> tell_waiting_;
  std::vector<Posted> posted_;
};

}  // namespace weft::collectives
