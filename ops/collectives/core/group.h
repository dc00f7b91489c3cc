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

  // Returns the operation that carries out `call`, to be submitted. A Message is one already.
  virtual OperationPtr make(CollectiveCall call) const = 0;
  // Starts an operation. `in_background`: perhaps no thread waits for it soon.
  // Errors: the failure of the group; std::runtime_error in a forked child.
  virtual void submit(OperationPtr operation, bool in_background) = 0;
  // Waits until the operation is done, or fails the group when `timeout` has passed (zero: the
  // operation's own deadline). Never throws the operation's error; throws std::runtime_error in a
  // forked child. An operation's on_done may wait for another one.
  virtual void wait(Operation& operation, std::chrono::milliseconds timeout) = 0;
  // Makes all progress that is possible without waiting.
  virtual void poll() = 0;

  // Returns memory of the group in which the caller may build the input of an all-reduce, which
  // saves copying it there; null if none is available. Other collectives of this rank wait until
  // submit_scratch() or release_scratch().
  virtual std::byte* acquire_scratch(size_t /*num_bytes*/) { return nullptr; }
  // Starts the all-reduce whose input was built there; the caller waits for it. If the group has
  // failed in the meantime, the operation fails.
  virtual void submit_scratch(OperationPtr /*operation*/) {}
  virtual void release_scratch() {}

  // Fails the group on every rank, at once.
  virtual void abort(const std::string& why) = 0;
  // Does the same with a CollectiveMismatchError whose message is `text`.
  virtual void fail_with_mismatch(const std::string& text) = 0;
  // Announces that this rank takes no further part, and fails operations that cannot finish at
  // once.
  virtual void leave() = 0;

  // The failure of the group, as an exception, or null.
  virtual std::exception_ptr failure() const = 0;
  virtual const GroupOptions& options() const = 0;
  // Return the resident shared memory of the group on this host, and the portion that this rank
  // writes.
  virtual size_t resident_bytes() const = 0;
  virtual size_t own_resident_bytes() const = 0;
};

}  // namespace weft::collectives
