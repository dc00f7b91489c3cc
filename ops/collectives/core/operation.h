#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <string>

namespace weft::collectives {

// An asynchronous operation of a rank in its group: a collective, a send or a receive. One thread
// creates it, one thread at a time carries it out, and any thread may wait for it.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // "all_reduce(sum, float32 [4])", for error messages.
  virtual std::string describe() const = 0;

  bool is_done() const { return done_.load(); }
  // Whether on_done has started.
  bool is_finishing() const { return finishing_.load(); }
  // The error with which the operation failed, or null. REQUIRES: is_done().
  std::exception_ptr error() const { return error_; }

  // Set it before the operation is submitted. Called once, with null or the error, by the thread
  // that carries the operation out, before is_done() returns true. An exception that it throws
  // becomes the error.
  std::function<void(std::exception_ptr)> on_done;
  // A waiting thread may set an earlier deadline while another thread carries the operation out.
  std::atomic<std::chrono::steady_clock::time_point> deadline{
      std::chrono::steady_clock::time_point::max()};
  // The timeout that set the deadline, for error messages. If it is zero when the operation is
  // submitted, the group's default applies.
  std::atomic<std::chrono::milliseconds> timeout{};
  // Added to the deadline, so that a rank that can name the cause fails the group first.
  std::chrono::milliseconds grace{0};

  // Called by the group. REQUIRES: not done.
  void finish(std::exception_ptr error);

 private:
  std::exception_ptr error_;
  std::atomic<bool> finishing_{false};
  std::atomic<bool> done_{false};
};

}  // namespace weft::collectives
