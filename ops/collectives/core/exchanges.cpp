#include "exchanges.h"

#include "ranges.h"
#include "streaming.h"

#include <algorithm>
#include <utility>

namespace weft::collectives {

namespace {

class Exchange : public Collective {
 public:
  explicit Exchange(CollectiveCall call) : Collective(std::move(call)) {
    size_t num_bytes = 0;
    for (const Output& output : this->call().outputs) {
      num_bytes += this->call().bytes_of(output.num_elements);
    }
    uses_nontemporal_stores_ = num_bytes >= kStreamedBytes;
  }

 protected:
  void copy_result(std::byte* to, const std::byte* from, size_t num_bytes) const {
    if (!uses_nontemporal_stores_ || to == from) return copy_bytes(to, from, num_bytes);
    stream_bytes(to, from, num_bytes);
    finish_streaming();
  }

 private:
  bool uses_nontemporal_stores_ = false;
};

// A rank sends the same data to all ranks that receive it: all_gather, gather, broadcast, barrier.
// It copies its input to its staging buffer, from which the receiving ranks copy.
class UniformExchange final : public Exchange {
 public:
  // outputs: by source rank, with null data for ranks from which this rank receives nothing. The
  // list may end before the last rank: see make_exchange.
  explicit UniformExchange(CollectiveCall call) : Exchange(std::move(call)) {}

 protected:
  [[nodiscard]] int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    return std::max<int64_t>(1, num_ranges(input_bytes(), staging_bytes));
  }

  void fill(int64_t chunk, const Staging& staging) override {
    if (call().inputs.empty()) return;
    const auto range = range_at(chunk, input_bytes(), staging.num_bytes());
    copy_bytes(staging.own(), call().inputs.front().data + range.first, range.size);
  }

  void drain(int64_t chunk, const Staging& staging) override {
    for (size_t peer = 0; peer < call().outputs.size(); ++peer) {
      const Output& output = call().outputs[peer];
      if (output.data == nullptr) continue;
      const auto range = range_at(chunk, call().bytes_of(output.num_elements), staging.num_bytes());
      const auto rank = static_cast<int>(peer);
      const bool is_own = rank == staging.rank() && !call().inputs.empty();
      copy_result(output.data + range.first,
                  is_own ? call().inputs.front().data + range.first : staging.of(rank),
                  range.size);
    }
  }

 private:
  [[nodiscard]] size_t input_bytes() const {
    return call().inputs.empty() ? 0 : call().bytes_of(call().inputs.front().num_elements);
  }
};

// A rank sends different data to each rank: all_to_all, scatter. Its staging buffer has a slot for
// each destination rank.
class PersonalizedExchange final : public Exchange {
 public:
  // inputs: by destination rank, or empty. outputs: as in UniformExchange.
  explicit PersonalizedExchange(CollectiveCall call) : Exchange(std::move(call)) {}

 protected:
  [[nodiscard]] int64_t num_chunks(size_t staging_bytes, int num_ranks) const override {
    int64_t max_chunks = 1;
    for (const Input& input : call().inputs) {
      max_chunks = std::max(
          max_chunks,
          num_ranges(call().bytes_of(input.num_elements), slot_bytes(staging_bytes, num_ranks)));
    }
    return max_chunks;
  }

  void fill(int64_t chunk, const Staging& staging) override {
    const size_t slot = slot_bytes(staging.num_bytes(), staging.num_ranks());
    for (size_t peer = 0; peer < call().inputs.size(); ++peer) {
      if (static_cast<int>(peer) == staging.rank()) continue;
      const Input& input = call().inputs[peer];
      const auto range = range_at(chunk, call().bytes_of(input.num_elements), slot);
      copy_bytes(staging.own() + peer * slot, input.data + range.first, range.size);
    }
  }

  void drain(int64_t chunk, const Staging& staging) override {
    const size_t slot = slot_bytes(staging.num_bytes(), staging.num_ranks());
    const auto own = static_cast<size_t>(staging.rank());
    for (size_t peer = 0; peer < call().outputs.size(); ++peer) {
      const Output& output = call().outputs[peer];
      if (output.data == nullptr) continue;
      const auto range = range_at(chunk, call().bytes_of(output.num_elements), slot);
      const std::byte* from = peer == own ? call().inputs[own].data + range.first
                                          : staging.of(static_cast<int>(peer)) + own * slot;
      copy_result(output.data + range.first, from, range.size);
    }
  }
};

}  // namespace

CollectivePtr make_exchange(CollectiveCall call) {
  const Op op = call.header.op;
  if ((op == Op::kBroadcast || op == Op::kScatter) && !call.outputs.empty()) {
    // Only the root sends: turn the single output into a list by source rank that ends at the root.
    const auto root = static_cast<size_t>(call.header.root);
    const Output only = call.outputs.front();
    call.outputs.assign(root + 1, Output{});
    call.outputs.back() = only;
  }
  if (op == Op::kScatter || op == Op::kAllToAll) {
    return std::make_shared<PersonalizedExchange>(std::move(call));
  }
  return std::make_shared<UniformExchange>(std::move(call));
}

}  // namespace weft::collectives
