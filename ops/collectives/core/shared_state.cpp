#include "shared_state.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

namespace weft::collectives {

namespace {

constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

size_t signature_stride(int num_ranks) {
  return round_up(sizeof(SignatureHeader) + 2 * sizeof(int64_t) * static_cast<size_t>(num_ranks),
                  64);
}

size_t ring_stride(const SharedSizes& sizes) { return sizeof(RingHeader) + sizes.ring_bytes; }

size_t index(int rank, int buffer) {
  return 2 * static_cast<size_t>(rank) + static_cast<size_t>(buffer);
}

}  // namespace

CollectiveError FailureRecord::record(ErrorKind kind, const std::string& text) {
  uint32_t expected = kEmpty;
  if (state_.compare_exchange_strong(expected, kWriting)) {
    kind_ = static_cast<uint32_t>(kind);
    num_chars_ = static_cast<uint32_t>(std::min(text.size(), text_.size()));
    std::memcpy(text_.data(), text.data(), num_chars_);
    state_.store(kReady, std::memory_order_release);
    return {kind, text};
  }
  // Another rank is writing its failure and needs a few more instructions. If that rank was killed
  // meanwhile, return this rank's own failure.
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (!is_set()) {
    if (std::chrono::steady_clock::now() > give_up) return {kind, text};
    std::this_thread::yield();
  }
  return get();
}

CollectiveError FailureRecord::get() const {
  return {static_cast<ErrorKind>(kind_), std::string(text_.data(), num_chars_)};
}

SharedSizes SharedSizes::within(int num_ranks, size_t limit_bytes) {
  const auto n = static_cast<size_t>(num_ranks);
  SharedSizes sizes;
  sizes.num_ranks = num_ranks;
  const auto bytes_each = [](size_t total, size_t num_buffers, size_t min, size_t max) {
    return std::clamp(total / num_buffers / 128 * 128, min, max);
  };
  // A quarter of the limit is for the rings of point-to-point messages and half for staging
  // buffers. Larger staging buffers were slower from 8 ranks on, because they no longer stayed in
  // the caches. Beyond the maximum sizes nothing became faster, measured with
  // benchmarks/collectives.py. For any number of ranks, half a staging buffer has a cache line for
  // each rank.
  sizes.ring_bytes =
      bytes_each(limit_bytes / 4, std::max<size_t>(n * (n - 1), 1), kPage, size_t{256} * 1024);
  const size_t min = round_up(size_t{2} * 64 * n, kPage);
  sizes.staging_bytes = bytes_each(limit_bytes / 2, 2 * n, min, std::max(min, size_t{1024} * 1024));
  return sizes;
}

size_t SharedState::num_bytes(const SharedSizes& sizes) {
  const auto n = static_cast<size_t>(sizes.num_ranks);
  size_t end = round_up(sizeof(Control) + n * sizeof(RankBlock), kPage);
  end += round_up(2 * n * signature_stride(sizes.num_ranks), kPage);
  end += 2 * n * sizes.staging_bytes;
  return round_up(end + n * n * ring_stride(sizes), kPage);
}

SharedState::SharedState(std::byte* data, const SharedSizes& sizes) : data_(data), sizes_(sizes) {
  const auto n = static_cast<size_t>(sizes.num_ranks);
  signatures_ = round_up(sizeof(Control) + n * sizeof(RankBlock), kPage);
  staging_ = signatures_ + round_up(2 * n * signature_stride(sizes.num_ranks), kPage);
  rings_ = staging_ + 2 * n * sizes.staging_bytes;
}

void SharedState::initialize() const {
  uint64_t nonce = 0;
  std::memcpy(&nonce, data_, sizeof nonce);
  new (data_) Control{};
  control().nonce = nonce;
  for (int r = 0; r < num_ranks(); ++r) {
    new (&rank(r)) RankBlock{};
    for (int buffer = 0; buffer < 2; ++buffer) new (&signature(r, buffer)) SignatureHeader{};
  }
  // The rings stay untouched: a zeroed header is valid, and untouched pages are not backed by
  // memory.
}

RankBlock& SharedState::rank(int rank) const {
  auto* first = reinterpret_cast<RankBlock*>(data_ + sizeof(Control));
  return first[rank];
}

SignatureHeader& SharedState::signature(int rank, int buffer) const {
  std::byte* address = data_ + signatures_ + index(rank, buffer) * signature_stride(num_ranks());
  return *reinterpret_cast<SignatureHeader*>(address);
}

std::span<int64_t> SharedState::signature_counts(int rank, int buffer) const {
  auto* address = reinterpret_cast<std::byte*>(&signature(rank, buffer)) + sizeof(SignatureHeader);
  return {reinterpret_cast<int64_t*>(address), 2 * static_cast<size_t>(num_ranks())};
}

std::byte* SharedState::staging(int rank, int buffer) const {
  return data_ + staging_ + index(rank, buffer) * staging_bytes();
}

std::array<Range<size_t>, 2> SharedState::ranges_written_by(int rank) const {
  const size_t rings = static_cast<size_t>(num_ranks()) * ring_stride(sizes_);
  return {{{staging_ + index(rank, 0) * staging_bytes(), 2 * staging_bytes()},
           {rings_ + static_cast<size_t>(rank) * rings, rings}}};
}

RingHeader& SharedState::ring(int from, int to) const {
  const size_t pair =
      static_cast<size_t>(from) * static_cast<size_t>(num_ranks()) + static_cast<size_t>(to);
  return *reinterpret_cast<RingHeader*>(data_ + rings_ + pair * ring_stride(sizes_));
}

std::byte* SharedState::ring_data(int from, int to) const {
  return reinterpret_cast<std::byte*>(&ring(from, to)) + sizeof(RingHeader);
}

}  // namespace weft::collectives
