#pragma once

// How bytes get from one host to another: passed by the code that makes the group.

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace weft::collectives {

// One message in flight. Dropping it gives it up: nothing is written to its memory any more.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer() = default;

  // Until the message has arrived, or left. Errors: std::exception where it did not within
  // `timeout`, its peer is lost, or it was given up.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
  // Makes wait() throw soon. Thread safety: called while another thread waits.
  virtual void give_up() = 0;
  // The source rank of a completed receive.
  virtual int source() const = 0;
};

// Between all ranks of a group. Messages of one sender, receiver and tag keep their order, and
// receiver and sender name the same size. Thread safety: one caller at a time.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // Both return at once; `data` lives until the transfer is done or dropped.
  virtual std::unique_ptr<Transfer> send(int peer,
                                         int tag,
                                         const std::byte* data,
                                         size_t num_bytes) = 0;
  // `peer` may be kAnySource.
  virtual std::unique_ptr<Transfer> receive(int peer,
                                            int tag,
                                            std::byte* data,
                                            size_t num_bytes) = 0;
};

// Called once the ranks know that they run on several hosts, on all of them, with a name for it
// that is the same on all ranks and was never used before.
using MakeTransport = std::function<std::unique_ptr<Transport>(const std::string& name)>;

}  // namespace weft::collectives
