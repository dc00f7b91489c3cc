#include "ring.h"

#include <algorithm>
#include <cstring>

namespace weft::collectives {

namespace {

uint64_t frame_bytes(const FrameHeader& header) {
  constexpr uint64_t kUnit = sizeof(FrameHeader);
  return kUnit + (header.payload_bytes + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

RingEnd::RingEnd(const SharedState& shared, int from, int to)
    : ring_header_(&shared.ring(from, to)),
      data_(shared.ring_data(from, to)),
      num_bytes_(shared.ring_bytes()) {}

int64_t RingEnd::space() const {
  const uint64_t used = ring_header_->num_written.load(std::memory_order_relaxed) -
                        ring_header_->num_read.load(std::memory_order_acquire);
  return static_cast<int64_t>(num_bytes_ - used) - static_cast<int64_t>(sizeof(FrameHeader));
}

void RingEnd::write(const FrameHeader& header, const std::byte* payload) {
  const uint64_t position = ring_header_->num_written.load(std::memory_order_relaxed);
  copy_in(position, &header, sizeof header);
  copy_in(position + sizeof header, payload, header.payload_bytes);
  ring_header_->num_written.store(position + frame_bytes(header), std::memory_order_release);
}

bool RingEnd::is_empty() const {
  return ring_header_->num_written.load(std::memory_order_acquire) ==
         ring_header_->num_read.load(std::memory_order_relaxed);
}

FrameHeader RingEnd::front() const {
  FrameHeader header;
  copy_out(ring_header_->num_read.load(std::memory_order_relaxed), &header, sizeof header);
  return header;
}

void RingEnd::read_payload(std::byte* out) const {
  copy_out(ring_header_->num_read.load(std::memory_order_relaxed) + sizeof(FrameHeader),
           out,
           front().payload_bytes);
}

void RingEnd::pop() {
  const uint64_t position = ring_header_->num_read.load(std::memory_order_relaxed);
  ring_header_->num_read.store(position + frame_bytes(front()), std::memory_order_release);
}

void RingEnd::copy_in(uint64_t position, const void* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  const size_t start = position % num_bytes_;
  const size_t first = std::min(num_bytes, num_bytes_ - start);
  std::memcpy(data_ + start, data, first);
  std::memcpy(data_, static_cast<const std::byte*>(data) + first, num_bytes - first);
}

void RingEnd::copy_out(uint64_t position, void* data, size_t num_bytes) const {
  if (num_bytes == 0) return;
  const size_t start = position % num_bytes_;
  const size_t first = std::min(num_bytes, num_bytes_ - start);
  std::memcpy(data, data_ + start, first);
  std::memcpy(static_cast<std::byte*>(data) + first, data_, num_bytes - first);
}

}  // namespace weft::collectives
