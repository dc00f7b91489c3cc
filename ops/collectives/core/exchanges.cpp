#include "exchanges.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace weft::collectives {

namespace {

int64_t chunks_of(size_t num_bytes, size_t chunk_bytes) {
  return static_cast<int64_t>((num_bytes + chunk_bytes - 1) / chunk_bytes);
}

// The bytes of `num_bytes` that belong to a chunk.
struct Part {
  size_t offset;
  size_t num_bytes;
};

Part part_of(int64_t chunk, size_t num_bytes, size_t chunk_bytes) {
  const size_t offset = std::min(static_cast<size_t>(chunk) * chunk_bytes, num_bytes);
  return {offset, std::min(chunk_bytes, num_bytes - offset)};
}

void copy(std::byte* to, const std::byte* from, size_t num_bytes) {
  if (num_bytes > 0 && to != from) std::memcpy(to, from, num_bytes);
}

size_t bytes_of(DType dtype, int64_t num_elements) {
  return static_cast<size_t>(num_elements) * size_of(dtype);
}

// Every rank that has an input shows it to all: all_gather, gather, broadcast, barrier.
class SharedExchange final : public Collective {
 public:
  // outputs: by rank, null data where this rank does not want that rank's input; may be empty.
  SharedExchange(SignatureHead head,
                 std::vector<int64_t> gives,
                 std::vector<int64_t> expects,
                 Input input,
                 std::vector<Output> outputs)
      : Collective(head, std::move(gives), std::move(expects)),
        input_(input),
        outputs_(std::move(outputs)) {}

 protected:
  int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    return std::max<int64_t>(1, chunks_of(input_bytes(), staging_bytes));
  }

  void fill(int64_t chunk, const Staging& staging) override {
    if (input_.data == nullptr) return;
    const Part part = part_of(chunk, input_bytes(), staging.num_bytes());
    copy(staging.own(), input_.data + part.offset, part.num_bytes);
  }

  void drain(int64_t chunk, const Staging& staging) override {
    for (size_t peer = 0; peer < outputs_.size(); ++peer) {
      const Output& output = outputs_[peer];
      if (output.data == nullptr) continue;
      const size_t num_bytes = bytes_of(head().dtype, output.num_elements);
      const Part part = part_of(chunk, num_bytes, staging.num_bytes());
      const auto rank = static_cast<int>(peer);
      const bool is_own = rank == staging.rank() && input_.data != nullptr;
      copy(output.data + part.offset,
           is_own ? input_.data + part.offset : staging.of(rank),
           part.num_bytes);
    }
  }

 private:
  size_t input_bytes() const { return bytes_of(head().dtype, input_.num_elements); }

  const Input input_;
  const std::vector<Output> outputs_;
};

// A rank's buffer holds a part for each rank: all_to_all, scatter.
class PersonalExchange final : public Collective {
 public:
  // inputs: by rank, or empty. outputs: by rank, null data where nothing is wanted.
  PersonalExchange(SignatureHead head,
                   std::vector<int64_t> gives,
                   std::vector<int64_t> expects,
                   std::vector<Input> inputs,
                   std::vector<Output> outputs)
      : Collective(head, std::move(gives), std::move(expects)),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)) {}

 protected:
  int64_t num_chunks(size_t staging_bytes, int num_ranks) const override {
    int64_t most = 1;
    for (const Input& input : inputs_) {
      most = std::max(most,
                      chunks_of(bytes_of(head().dtype, input.num_elements),
                                part_bytes(staging_bytes, num_ranks)));
    }
    return most;
  }

  void fill(int64_t chunk, const Staging& staging) override {
    const size_t stride = part_bytes(staging.num_bytes(), staging.num_ranks());
    for (size_t peer = 0; peer < inputs_.size(); ++peer) {
      if (static_cast<int>(peer) == staging.rank()) continue;
      const Part part = part_of(chunk, bytes_of(head().dtype, inputs_[peer].num_elements), stride);
      copy(staging.own() + peer * stride, inputs_[peer].data + part.offset, part.num_bytes);
    }
  }

  void drain(int64_t chunk, const Staging& staging) override {
    const size_t stride = part_bytes(staging.num_bytes(), staging.num_ranks());
    const auto own = static_cast<size_t>(staging.rank());
    for (size_t peer = 0; peer < outputs_.size(); ++peer) {
      const Output& output = outputs_[peer];
      if (output.data == nullptr) continue;
      const Part part = part_of(chunk, bytes_of(head().dtype, output.num_elements), stride);
      const std::byte* from = peer == own ? inputs_[own].data + part.offset
                                          : staging.of(static_cast<int>(peer)) + own * stride;
      copy(output.data + part.offset, from, part.num_bytes);
    }
  }

 private:
  // Whole cache lines, so that ranks do not share one.
  static size_t part_bytes(size_t staging_bytes, int num_ranks) {
    return staging_bytes / static_cast<size_t>(num_ranks) / 64 * 64;
  }

  const std::vector<Input> inputs_;
  const std::vector<Output> outputs_;
};

template <typename List>
std::vector<int64_t> counts_of(const List& list) {
  std::vector<int64_t> counts;
  counts.reserve(list.size());
  for (const auto& item : list) counts.push_back(item.num_elements);
  return counts;
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

std::vector<int64_t> zeros(int num_ranks) {
  return std::vector<int64_t>(static_cast<size_t>(num_ranks), 0);
}

SignatureHead head_of(Op op, DType dtype, int64_t num_elements, int root = -1) {
  SignatureHead head;
  head.op = op;
  head.dtype = dtype;
  head.num_elements = num_elements;
  head.root = root;
  return head;
}

}  // namespace

void set_shape(SignatureHead& head, const TensorFacts& facts) {
  head.dtype = facts.dtype;
  head.num_elements = std::accumulate(
      facts.shape.begin(), facts.shape.end(), int64_t{1}, std::multiplies<int64_t>());
  if (facts.shape.size() <= SignatureHead::kMaxDims) {
    head.num_dims = static_cast<uint8_t>(facts.shape.size());
    std::ranges::copy(facts.shape, head.shape.begin());
  }
}

CollectivePtr make_barrier() {
  return std::make_shared<SharedExchange>(SignatureHead{},
                                          std::vector<int64_t>{},
                                          std::vector<int64_t>{},
                                          Input{},
                                          std::vector<Output>{});
}

CollectivePtr make_broadcast(const TensorFacts& facts, Output tensor, int root, int rank) {
  SignatureHead head;
  head.op = Op::kBroadcast;
  head.root = root;
  set_shape(head, facts);
  if (rank == root) {
    return std::make_shared<SharedExchange>(head,
                                            std::vector<int64_t>{},
                                            std::vector<int64_t>{},
                                            Input{tensor.data, tensor.num_elements},
                                            std::vector<Output>{});
  }
  std::vector<Output> outputs(static_cast<size_t>(root) + 1);
  outputs.back() = tensor;
  return std::make_shared<SharedExchange>(
      head, std::vector<int64_t>{}, std::vector<int64_t>{}, Input{}, std::move(outputs));
}

CollectivePtr make_all_gather(DType dtype, Input input, std::vector<Output> outputs) {
  std::vector<int64_t> gives(outputs.size(), input.num_elements);
  auto expects = counts_of(outputs);
  return std::make_shared<SharedExchange>(head_of(Op::kAllGather, dtype, input.num_elements),
                                          std::move(gives),
                                          std::move(expects),
                                          input,
                                          std::move(outputs));
}

CollectivePtr make_gather(
    DType dtype, Input input, std::vector<Output> outputs, int root, int rank, int num_ranks) {
  auto gives = zeros(num_ranks);
  gives[static_cast<size_t>(root)] = input.num_elements;
  auto expects = rank == root ? counts_of(outputs) : zeros(num_ranks);
  return std::make_shared<SharedExchange>(head_of(Op::kGather, dtype, input.num_elements, root),
                                          std::move(gives),
                                          std::move(expects),
                                          input,
                                          std::move(outputs));
}

CollectivePtr make_scatter(
    DType dtype, std::vector<Input> inputs, Output output, int root, int rank, int num_ranks) {
  auto gives = rank == root ? counts_of(inputs) : zeros(num_ranks);
  auto expects = zeros(num_ranks);
  expects[static_cast<size_t>(root)] = output.num_elements;
  std::vector<Output> outputs(static_cast<size_t>(root) + 1);
  outputs.back() = output;
  const int64_t num_elements = total(gives);
  return std::make_shared<PersonalExchange>(head_of(Op::kScatter, dtype, num_elements, root),
                                            std::move(gives),
                                            std::move(expects),
                                            std::move(inputs),
                                            std::move(outputs));
}

CollectivePtr make_all_to_all(DType dtype, std::vector<Input> inputs, std::vector<Output> outputs) {
  auto gives = counts_of(inputs);
  auto expects = counts_of(outputs);
  const int64_t num_elements = total(gives);
  return std::make_shared<PersonalExchange>(head_of(Op::kAllToAll, dtype, num_elements),
                                            std::move(gives),
                                            std::move(expects),
                                            std::move(inputs),
                                            std::move(outputs));
}

}  // namespace weft::collectives
