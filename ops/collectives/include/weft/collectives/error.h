#pragma once

// The errors of a group. A failed group stays failed on every rank. Exception: GroupAbortedError on
// a rank that has left the group does not affect the other ranks.

#include <cstdint>
#include <stdexcept>
#include <string>

// Exported: one library throws these classes and another catches them.
#define WEFT_COLLECTIVES_API __attribute__((visibility("default")))

namespace weft::collectives {

enum class ErrorKind : uint32_t {
  kMismatch = 1,  // the ranks' calls, messages or group configurations do not match
  kPeerLost,      // a rank's process or its connection ended, or the rank left too early
  kTimeout,       // a rank did not arrive in time
  kAborted,       // a rank aborted the group, could not join it, failed inside a call, or had left
};

class WEFT_COLLECTIVES_API CollectiveError : public std::runtime_error {
 public:
  CollectiveError(ErrorKind kind, const std::string& text)
      : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

class WEFT_COLLECTIVES_API CollectiveMismatchError final : public CollectiveError {
 public:
  explicit CollectiveMismatchError(const std::string& text)
      : CollectiveError(ErrorKind::kMismatch, text) {}
};

class WEFT_COLLECTIVES_API PeerLostError final : public CollectiveError {
 public:
  explicit PeerLostError(const std::string& text) : CollectiveError(ErrorKind::kPeerLost, text) {}
};

class WEFT_COLLECTIVES_API CollectiveTimeoutError final : public CollectiveError {
 public:
  explicit CollectiveTimeoutError(const std::string& text)
      : CollectiveError(ErrorKind::kTimeout, text) {}
};

class WEFT_COLLECTIVES_API GroupAbortedError final : public CollectiveError {
 public:
  explicit GroupAbortedError(const std::string& text)
      : CollectiveError(ErrorKind::kAborted, text) {}
};

// Throws the error class of `kind`.
[[noreturn]] inline void throw_error(ErrorKind kind, const std::string& text) {
  switch (kind) {
    case ErrorKind::kMismatch:
      throw CollectiveMismatchError(text);
    case ErrorKind::kPeerLost:
      throw PeerLostError(text);
    case ErrorKind::kTimeout:
      throw CollectiveTimeoutError(text);
    case ErrorKind::kAborted:
      break;
  }
  throw GroupAbortedError(text);
}

}  // namespace weft::collectives
