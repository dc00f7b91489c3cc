#pragma once

// The ranks that work together, wherever they run. Thread safety: all of it.

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

  // What carries `call` out, to be submitted. A message needs no such step.
  virtual OperationPtr make(CollectiveCall call) const = 0;
  // Begins an operation. `in_background`: possibly no thread waits for it soon.
  // Errors: the group's, if it has failed; std::runtime_error in a forked child.
  virtual void submit(OperationPtr operation, bool in_background) = 0;
  // Until it is done, or `timeout` has passed (zero: its own deadline): then the group fails.
  // Never throws what the operation failed with; std::runtime_error in a forked child. An
  // operation's on_done may wait for another one.
  virtual void wait(Operation& operation, std::chrono::milliseconds timeout) = 0;
  // Does what can be done without waiting.
  virtual void poll() = 0;

  // Memory in which the caller may build the input of an all-reduce, so that nothing is copied
  // there. Null where none can be had now, and always where the group has none: then build it
  // elsewhere. From here to submit_lent() or give_back() other operations of this rank wait.
  virtual std::byte* lend_scratch(size_t /*num_bytes*/) { return nullptr; }
  // Begins the all-reduce whose input was built there, one that its caller waits for. A group that
  // has failed since fails it.
  virtual void submit_lent(OperationPtr /*operation*/) {}
  virtual void give_back_scratch() {}

  // Fails the group on every rank, at once.
  virtual void abort(const std::string& why) = 0;
  // The same with a CollectiveMismatchError of that text.
  virtual void refuse(const std::string& text) = 0;
  // Tells the others that nothing more comes from here, and fails what cannot be finished at once.
  virtual void leave() = 0;

  // The failure of the group, as an exception, or null.
  virtual std::exception_ptr failure() const = 0;
  virtual const GroupOptions& options() const = 0;
  // Shared memory of the group that this host holds now, and the part of it in which this rank
  // writes.
  virtual size_t resident_bytes() const = 0;
  virtual size_t own_resident_bytes() const = 0;
};

}  // namespace weft::collectives
