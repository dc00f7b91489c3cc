#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// The connections of one NCCL communicator: a Unix socket to each other rank of the host.
namespace weft::cuda_runtime {

// A message to or from a rank. Both sides give the same `name`, which says what the call is.
struct Transfer {
  int peer = 0;
  void* bytes = nullptr;  // written only if the message is received
  std::size_t num_bytes = 0;
  std::string name = {};
};

// The communicator was aborted.
class Aborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Progress;

class Wire {
 public:
  // Connects to all ranks; returns when all have made the same call. `id` names the communicator.
  // Throws std::runtime_error on a time-out.
  Wire(const std::string& id, int rank, int num_ranks);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Sends and receives at the same time, and returns when each receiver has confirmed what was sent
  // to it: a send ends no earlier than the call that receives it begins.
  // Throws std::runtime_error if a peer's message has another name or size, and Aborted after
  // abort(). Like NCCL between GPUs of a host, it does not notice that a peer has ended: it waits
  // until abort().
  void exchange(const std::vector<Transfer>& sent, const std::vector<Transfer>& received);

  void abort() { is_aborted_ = true; }

 private:
  int listen_as(const std::string& id) const;
  void progress(std::vector<Progress>& all);
  bool move_bytes(Progress& message, int socket) const;  // returns whether bytes were moved

  const int rank_;
  std::vector<int> sockets_;  // by rank; -1: this rank
  std::atomic<bool> is_aborted_{false};
};

}  // namespace weft::cuda_runtime
