#pragma once

// How a failure of a group is raised to the caller: as the C++ class, or as the exception that a
// language binding makes of it.

#include <weft/collectives/error.h>
#include <weft/ops/export.h>

#include <exception>
#include <string>
#include <string_view>

namespace weft::collectives {

struct ErrorHooks {
  // Throws the binding's exception for a failure. Called on the thread to which the failure is
  // raised.
  void (*raise)(ErrorKind kind, const std::string& text) = nullptr;
  // Returns an exception that may be thrown many times, on any thread: for a future.
  std::exception_ptr (*make_storable)(ErrorKind kind, const std::string& text) = nullptr;
};

// Sets the hooks for all later failures. With a null hook, failures are raised as the C++ classes.
WEFT_OPS_API void set_error_hooks(const ErrorHooks& hooks);

// While a RaiseContext exists, the error texts that the raise hook gets on this thread begin with
// the operation: "weft::row_linear: the all-reduce failed on rank 1 of its group: ...". The texts
// of the C++ classes stay as they are: the code that catches them can add text().
class RaiseContext {
 public:
  // `op` and `what` must outlive the context.
  RaiseContext(std::string_view op, std::string_view what, int rank);
  ~RaiseContext();
  RaiseContext(const RaiseContext&) = delete;
  RaiseContext& operator=(const RaiseContext&) = delete;

  // "weft::row_linear: the all-reduce failed on rank 1 of its group"
  std::string text() const;

 private:
  std::string_view op_;
  std::string_view what_;
  int rank_;
  const RaiseContext* outer_;
};

// Throws `error`; if it is a CollectiveError and the raise hook is set, calls the hook, which
// throws the binding's exception.
[[noreturn]] void raise(std::exception_ptr error);
// Returns `error`; if it is a CollectiveError and the make_storable hook is set, returns the hook's
// result.
std::exception_ptr make_storable(std::exception_ptr error);

}  // namespace weft::collectives
