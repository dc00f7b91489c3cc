#pragma once

// How a failure of a group reaches the caller: as the C++ class, or as what a language above makes
// of it.

#include <weft/collectives/error.h>
#include <weft/ops/export.h>

#include <exception>
#include <string>
#include <string_view>

namespace weft::collectives {

struct ErrorHooks {
  // Throws its own exception for a failure. Called on the thread that called the operation.
  void (*raise)(ErrorKind kind, const std::string& text) = nullptr;
  // Makes one that may be thrown many times, on any thread: for a future.
  std::exception_ptr (*keep)(ErrorKind kind, const std::string& text) = nullptr;
};

// For all failures from now on; null: the C++ classes.
WEFT_OPS_API void set_error_hooks(const ErrorHooks& hooks);

// While it lives, what is raised on this thread says first what was being done: "weft::row_linear:
// the all-reduce failed on rank 1 of its group: ...". For hooks; the C++ classes are left as they
// are, for who catches them to add to.
class RaiseContext {
 public:
  // `op` and `what` outlive this.
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

// Throws `error` as the caller is to get it.
[[noreturn]] void raise(std::exception_ptr error);
// The same, to be thrown by others.
std::exception_ptr kept(std::exception_ptr error);

}  // namespace weft::collectives
