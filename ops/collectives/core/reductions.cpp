#include "reductions.h"

#include "ranges.h"
#include "reduce.h"
#include "streaming.h"

#include <algorithm>
#include <utility>

namespace weft::collectives {

namespace {

// A range of elements.
using ElementRange = Range<int64_t>;

class Reduction : public Collective {
 public:
  explicit Reduction(CollectiveCall call)
      : Collective(std::move(call)),
        element_bytes_(static_cast<int64_t>(size_of(header().dtype))) {}

 protected:
  [[nodiscard]] int64_t elements_in(size_t num_bytes) const {
    return static_cast<int64_t>(num_bytes) / element_bytes_;
  }
  [[nodiscard]] size_t bytes_of(int64_t num_elements) const {
    return static_cast<size_t>(num_elements * element_bytes_);
  }

  // Reduces one range into `out`. `own` is this rank's input; the input of another rank is in that
  // rank's staging buffer, offset_of(rank) bytes from the start.
  template <typename OffsetOf>
  void reduce_into(std::byte* out,
                   const std::byte* own,
                   const OffsetOf& offset_of,
                   int64_t num_elements,
                   const Staging& staging,
                   bool streams = false) {
    if (num_elements == 0) return;
    sources_.clear();
    for (int peer = 0; peer < staging.num_ranks(); ++peer) {
      sources_.push_back(peer == staging.rank() ? own : staging.of(peer) + offset_of(peer));
    }
    reduce(header().reduce_op, header().dtype, out, sources_, num_elements, 0, streams);
  }

  // The chunks of a tensor, for collectives whose staging buffers have no slots by rank.
  [[nodiscard]] ElementRange chunk_range(int64_t chunk, const Staging& staging) const {
    return range_at(chunk, num_elements(), elements_in(staging.num_bytes()));
  }
  [[nodiscard]] int64_t chunks_of_tensor(size_t staging_bytes) const {
    return std::max<int64_t>(1, num_ranges(num_elements(), elements_in(staging_bytes)));
  }
  // For reduce_into(): every rank's input is at the start of its staging buffer.
  static size_t no_offset(int /*peer*/) { return 0; }
  [[nodiscard]] const std::byte* input_at(int64_t element) const {
    return call().inputs.front().data + bytes_of(element);
  }
  [[nodiscard]] std::byte* output_at(int64_t element) const {
    return call().outputs.front().data + bytes_of(element);
  }

 private:
  [[nodiscard]] int64_t num_elements() const { return call().inputs.front().num_elements; }

  const int64_t element_bytes_;
  std::vector<const std::byte*> sources_;
};

// Tensors up to kOneShotBytes are reduced in one shot: every rank fills its staging buffer with its
// input and reduces all inputs itself. Larger tensors use a reduce-scatter and an all-gather: a
// chunk has a segment for each rank; a rank fills all segments but its own, combines its own
// segment from its input and the staging buffers of the other ranks, and drains the other segments
// from the staging buffers of the ranks that reduced them.
class AllReduce final : public Reduction {
 public:
  explicit AllReduce(CollectiveCall call)
      : Reduction(std::move(call)), in_segments_(bytes_of(header().num_elements) > kOneShotBytes) {}

 protected:
  [[nodiscard]] int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    return chunks_of_tensor(staging_bytes);
  }
  [[nodiscard]] bool combines() const override { return in_segments_; }
  [[nodiscard]] bool uses_one_full_buffer(size_t buffer_bytes) const override {
    return bytes_of(header().num_elements) <= buffer_bytes;
  }

  void fill(int64_t chunk, const Staging& staging) override {
    const ElementRange range = chunk_range(chunk, staging);
    if (!in_segments_) {
      return copy_bytes(staging.own(), input_at(range.first), bytes_of(range.size));
    }
    for (int peer = 0; peer < staging.num_ranks(); ++peer) {
      if (peer == staging.rank()) continue;  // combine() reads this rank's segment from the input
      const ElementRange segment = segment_range(peer, range, staging);
      copy_bytes(staging.own() + bytes_of(segment.first),
                 input_at(range.first + segment.first),
                 bytes_of(segment.size));
    }
  }

  // Reduces into the output, kBlockBytes at a time, and copies each result from there to the
  // staging buffer while it is in the nearest cache. The other ranks have read these lines of the
  // staging buffer before: a store to such a line waits until this processor owns the line, a copy
  // of full lines does not. Measured with benchmarks/collectives.py, 1 MiB on 2 ranks: on
  // processors that share no cache 72 us, and 163 us if the reduction itself stores to the output
  // and to the staging buffer; on processors that share a cache 44 us and 41 us.
  void combine(int64_t chunk, const Staging& staging) override {
    const ElementRange range = chunk_range(chunk, staging);
    const ElementRange segment = segment_range(staging.rank(), range, staging);
    const int64_t block_size = elements_in(kBlockBytes);
    for (int64_t i = 0; i < num_ranges(segment.size, block_size); ++i) {
      const ElementRange block = range_at(i, segment.size, block_size);
      const int64_t first = segment.first + block.first;
      const size_t offset = bytes_of(first);
      std::byte* const out = output_at(range.first + first);
      reduce_into(
          out,
          input_at(range.first + first),
          [&](int /*peer*/) { return offset; },
          block.size,
          staging);
      copy_bytes(staging.own() + offset, out, bytes_of(block.size));
    }
  }

  void drain(int64_t chunk, const Staging& staging) override {
    const ElementRange range = chunk_range(chunk, staging);
    if (!in_segments_) {
      return reduce_into(
          output_at(range.first), input_at(range.first), no_offset, range.size, staging);
    }
    for (int peer = 0; peer < staging.num_ranks(); ++peer) {
      if (peer == staging.rank()) continue;  // combine() has written this rank's segment
      const ElementRange segment = segment_range(peer, range, staging);
      copy_bytes(output_at(range.first + segment.first),
                 staging.of(peer) + bytes_of(segment.first),
                 bytes_of(segment.size));
    }
  }

 private:
  static constexpr size_t kBlockBytes = size_t{16} * 1024;

  // Returns the segment of a chunk that `rank` reduces. All segments have the same size, a multiple
  // of the cache line, except that the last ones may be shorter or empty.
  [[nodiscard]] ElementRange segment_range(int rank,
                                           const ElementRange& range,
                                           const Staging& staging) const {
    const int64_t line = elements_in(64);
    const int64_t segment_size =
        num_ranges<int64_t>(num_ranges<int64_t>(range.size, staging.num_ranks()), line) * line;
    return range_at(rank, range.size, segment_size);
  }

  const bool in_segments_;
};

// All ranks but the root fill, the root drains.
class Reduce final : public Reduction {
 public:
  explicit Reduce(CollectiveCall call) : Reduction(std::move(call)) {}

 protected:
  [[nodiscard]] int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    return chunks_of_tensor(staging_bytes);
  }

  void fill(int64_t chunk, const Staging& staging) override {
    if (is_root()) return;
    const ElementRange range = chunk_range(chunk, staging);
    copy_bytes(staging.own(), input_at(range.first), bytes_of(range.size));
  }

  void drain(int64_t chunk, const Staging& staging) override {
    if (!is_root()) return;
    const ElementRange range = chunk_range(chunk, staging);
    reduce_into(output_at(range.first), input_at(range.first), no_offset, range.size, staging);
  }

 private:
  [[nodiscard]] bool is_root() const { return !call().outputs.empty(); }
};

// The staging buffer of a rank has a slot for each other rank; that rank drains and reduces the
// slot.
class ReduceScatter final : public Reduction {
 public:
  ReduceScatter(CollectiveCall call, int rank)
      : Reduction(std::move(call)), own_(static_cast<size_t>(rank)) {
    for (const Input& input : this->call().inputs) {
      largest_segment_ = std::max(largest_segment_, input.num_elements);
    }
  }

 protected:
  // With many ranks a chunk has few elements per rank, and a barrier costs more. Measured with
  // benchmarks/collectives.py: with full buffers, 32 MiB on 8 ranks take 0.93 of the time.
  [[nodiscard]] bool alternates_full_buffers() const override {
    return call().inputs.size() > 4 && bytes_of(header().num_elements) >= 2 * kStreamedBytes;
  }
  [[nodiscard]] int64_t num_chunks(size_t staging_bytes, int num_ranks) const override {
    return std::max<int64_t>(1,
                             num_ranges(largest_segment_, slot_elements(staging_bytes, num_ranks)));
  }

  void fill(int64_t chunk, const Staging& staging) override {
    for (size_t peer = 0; peer < call().inputs.size(); ++peer) {
      if (peer == own_) continue;
      const ElementRange range = range_in(chunk, call().inputs[peer].num_elements, staging);
      copy_bytes(staging.own() + slot_offset(peer, own_, staging),
                 call().inputs[peer].data + bytes_of(range.first),
                 bytes_of(range.size));
    }
  }

  void drain(int64_t chunk, const Staging& staging) override {
    const Output& output = call().outputs.front();
    const ElementRange range = range_in(chunk, output.num_elements, staging);
    const size_t first = bytes_of(range.first);
    reduce_into(
        output.data + first,
        call().inputs[own_].data + first,
        [&](int peer) { return slot_offset(own_, static_cast<size_t>(peer), staging); },
        range.size,
        staging,
        bytes_of(header().num_elements) >= 2 * kStreamedBytes);
  }

 private:
  // Returns the size of a slot: no larger than the largest segment needs, because untouched pages
  // are not backed by memory.
  [[nodiscard]] int64_t slot_elements(size_t staging_bytes, int num_ranks) const {
    const int64_t line = elements_in(64);
    const int64_t wanted = std::max<int64_t>(1, num_ranges(largest_segment_, line)) * line;
    return std::min(wanted, elements_in(slot_bytes(staging_bytes, num_ranks)));
  }
  // Returns the offset, in bytes, of the slot for `rank` in the buffer of rank `from`, which has no
  // slot for itself.
  [[nodiscard]] size_t slot_offset(size_t rank, size_t from, const Staging& staging) const {
    const size_t slot_idx = rank < from ? rank : rank - 1;
    return slot_idx * bytes_of(slot_elements(staging.num_bytes(), staging.num_ranks()));
  }
  [[nodiscard]] ElementRange range_in(int64_t chunk,
                                      int64_t num_elements,
                                      const Staging& staging) const {
    return range_at(chunk, num_elements, slot_elements(staging.num_bytes(), staging.num_ranks()));
  }

  const size_t own_;
  int64_t largest_segment_ = 0;  // in elements; the same on all ranks
};

}  // namespace

CollectivePtr make_reduction(CollectiveCall call, int rank) {
  switch (call.header.op) {
    case Op::kReduceScatter:
      return std::make_shared<ReduceScatter>(std::move(call), rank);
    case Op::kReduce:
      return std::make_shared<Reduce>(std::move(call));
    default:
      return std::make_shared<AllReduce>(std::move(call));
  }
}

}  // namespace weft::collectives
