#pragma once

#include "shared_state.h"

#include <cstddef>
#include <cstdint>

namespace weft::collectives {

// A ring is a buffer in shared memory with one writer and one reader. It counts the bytes written
// and read since the start; a count modulo the size of the buffer is a position in it. It holds
// frames of a header and a payload, padded to a multiple of the header's size:
//   kAnnounce  a message was sent; the payload is its data if it is eager
//   kGrant     a receive matches the announced message: send its data
//   kData      a chunk of a granted message
enum class FrameKind : uint8_t { kAnnounce = 1, kGrant, kData };

struct FrameHeader {
  FrameKind kind = FrameKind::kAnnounce;
  DType dtype = DType::kUInt8;
  uint16_t unused = 0;
  int32_t tag = 0;
  uint64_t message_id = 0;  // counts the messages from their sender to their receiver, from 0
  uint64_t message_bytes = 0;
  uint64_t payload_bytes = 0;
};
static_assert(sizeof(FrameHeader) == 32);

// The writing end of the ring to a peer, or the reading end of the ring from a peer. Thread safety:
// one thread at a time.
class RingEnd {
 public:
  RingEnd(const SharedState& shared, int from, int to);

  // Returns the payload bytes that a frame written now can hold; negative if no header fits.
  int64_t space() const;
  // REQUIRES: header.payload_bytes <= space().
  void write(const FrameHeader& header, const std::byte* payload);

  bool is_empty() const;
  // Returns the header of the oldest frame. REQUIRES: not empty. Call read_payload(), then pop().
  FrameHeader front() const;
  void read_payload(std::byte* out) const;
  void pop();

 private:
  void copy_in(uint64_t position, const void* data, size_t num_bytes);
  void copy_out(uint64_t position, void* data, size_t num_bytes) const;

  RingHeader* ring_header_;
  std::byte* data_;
  size_t num_bytes_;
};

}  // namespace weft::collectives
