#pragma once

// A group of ranks, on one host or several. Thread-safe.

#include "call.h"
#include "operation.h"
#include "rendezvous.h"

#include <exception>
#include <memory>
#include <string>

namespace weft::collectives {

using OperationPtr = std::shared_ptr<Operation>;

class Group {
 public:
  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  virtual ~Group() = default;

  // Returns the operation that carries out `call`; pass it to submit(). A Message (messages.h) is
  // an operation already.
  virtual OperationPtr make(CollectiveCall call) const = 0;
  // Starts an operation. `in_background`: the group makes progress on the operation even if no
  // thread waits for it. Errors: the failure of the group; GroupAbortedError after leave();
  // std::runtime_error in a forked child; std::invalid_argument for a message tag that the group
  // cannot send.
  virtual void submit(OperationPtr operation, bool in_background) = 0;
  // Waits until the operation is done. Fails the group when `timeout` (zero: none) or the
  // operation's own deadline has passed. Never throws the operation's error; throws
  // std::runtime_error in a forked child. An operation's on_done may wait for another operation.
  virtual void wait(Operation& operation, std::chrono::milliseconds timeout) = 0;
  // Makes all progress that is possible without waiting.
  virtual void poll() = 0;

  // Returns shared memory of the group, into which the caller may write the input of an all-reduce;
  // this saves a copy of the input. Returns null if none is available. Other collectives of this
  // rank wait until submit_scratch() or release_scratch().
  virtual std::byte* acquire_scratch(size_t /*num_bytes*/) { return nullptr; }
  // Starts the all-reduce whose input was written to the acquired memory; the caller must wait for
  // the operation. If the group has failed in the meantime, the operation fails.
  virtual void submit_scratch(OperationPtr /*operation*/) {}
  virtual void release_scratch() {}

  // Fails the group on every rank, without waiting for operations in flight.
  virtual void abort(const std::string& why) = 0;
  // Like abort(), with a CollectiveMismatchError whose message is `text`.
  virtual void fail_with_mismatch(const std::string& text) = 0;
  // Announces that this rank leaves the group. Its operations in flight complete if they can
  // without waiting; the others fail.
  virtual void leave() = 0;

  // Returns the failure of the group as an exception, or null.
  virtual std::exception_ptr failure() const = 0;
  virtual const GroupOptions& options() const = 0;
  // Return the resident bytes of the group's shared memory on this host, and of the portion that
  // holds this rank's staging buffers and outgoing message rings.
  virtual size_t resident_bytes() const = 0;
  virtual size_t own_resident_bytes() const = 0;
};

}  // namespace weft::collectives
