#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <string>

namespace weft::collectives {

// Something that a rank has asked its group for: a collective, a send, a receive. Made by one
// thread, carried out by whichever thread drives the engine, waited for by any.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // "all_reduce(sum, float32 [4])", for texts.
  virtual std::string describe() const = 0;

  bool is_done() const { return done_.load(); }
  // Whether on_done runs now.
  bool is_finishing() const { return finishing_.load(); }
  // What it failed with, or null. REQUIRES: is_done().
  std::exception_ptr error() const { return error_; }

  // Set before it is submitted. Called once, by the driving thread, before it counts as done:
  // with null or the error. What it throws becomes the error.
  std::function<void(std::exception_ptr)> on_done;
  // Who waits may bring it forward while another thread drives.
  std::atomic<std::chrono::steady_clock::time_point> deadline{
      std::chrono::steady_clock::time_point::max()};
  std::atomic<std::chrono::milliseconds> timeout{};  // that made the deadline, for texts
  std::chrono::milliseconds grace{0};  // beyond it, for who is told by others what went wrong

  // For the engine. REQUIRES: not done.
  void finish(std::exception_ptr error);

 private:
  std::exception_ptr error_;
  std::atomic<bool> finishing_{false};
  std::atomic<bool> done_{false};
};

}  // namespace weft::collectives
