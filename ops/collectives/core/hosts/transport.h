#pragma once

// The interface through which bytes are sent between hosts. The code that makes the group passes an
// implementation.

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace weft::collectives {

// One message in flight. The destructor cancels it: memory to receive into is not written any more.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer() = default;

  // Waits until the message has arrived (a receive) or left (a send). Throws a std::exception after
  // `timeout`, if the peer is lost, or after give_up().
  virtual void wait(std::chrono::milliseconds timeout) = 0;
  // Makes wait() throw soon. Thread safety: may be called while another thread waits.
  virtual void give_up() = 0;
  // The source rank of a completed receive.
  virtual int source() const = 0;
};

// Connects all ranks of a group. Messages of one sender, receiver and tag keep their order; sender
// and receiver pass the same size. Thread safety: one caller at a time.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // send() and receive() return without waiting; `data` must stay valid until the transfer is done
  // or destroyed.
  virtual std::unique_ptr<Transfer> send(int peer,
                                         int tag,
                                         const std::byte* data,
                                         size_t num_bytes) = 0;
  // `peer` may be kAnySource for the header of a message, which is small: see remote_messages.h.
  virtual std::unique_ptr<Transfer> receive(int peer,
                                            int tag,
                                            std::byte* data,
                                            size_t num_bytes) = 0;
};

// Called on all ranks of a multi-host group, with a name for the transport that is the same on all
// ranks and unique to the group.
using MakeTransport = std::function<std::unique_ptr<Transport>(const std::string& name)>;

}  // namespace weft::collectives
