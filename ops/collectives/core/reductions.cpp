#include "reductions.h"

#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace weft::collectives {

namespace {

// Elements [first, first + size).
struct Range {
  int64_t first;
  int64_t size;
};

Range range_of(int64_t index, int64_t range_size, int64_t num_elements) {
  const int64_t first = std::min(index * range_size, num_elements);
  return {first, std::min(range_size, num_elements - first)};
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Reduction : public Collective {
 public:
  Reduction(SignatureHead head, std::vector<int64_t> gives, std::vector<int64_t> expects)
      : Collective(head, std::move(gives), std::move(expects)),
        size_(static_cast<int64_t>(size_of(head.dtype))) {}

 protected:
  int64_t elements_in(size_t num_bytes) const { return static_cast<int64_t>(num_bytes) / size_; }
  size_t bytes_of(int64_t num_elements) const { return static_cast<size_t>(num_elements * size_); }

  // Reduces one range: `own` is this rank's, the others' lie at `offset` of their buffers.
  void reduce_into(std::byte* out,
                   const std::byte* own,
                   size_t offset,
                   int64_t num_elements,
                   const Staging& staging,
                   std::byte* second_out = nullptr) {
    if (num_elements == 0) return;
    sources_.clear();
    for (int peer = 0; peer < staging.num_ranks(); ++peer) {
      sources_.push_back(peer == staging.rank() ? own : staging.of(peer) + offset);
    }
    reduce(head().reduce_op, head().dtype, out, sources_, num_elements, second_out);
  }

  void copy(std::byte* to, const std::byte* from, int64_t num_elements) const {
    if (num_elements > 0 && to != from) std::memcpy(to, from, bytes_of(num_elements));
  }

 private:
  const int64_t size_;
  std::vector<const std::byte*> sources_;
};

class AllReduce final : public Reduction {
 public:
  AllReduce(SignatureHead head, Input input, Output output)
      : Reduction(head, {}, {}),
        input_(input),
        output_(output),
        in_slices_(bytes_of(input.num_elements) > kOneShotBytes) {}

 protected:
  int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    return std::max<int64_t>(1, ceil_div(input_.num_elements, elements_in(staging_bytes)));
  }
  bool combines() const override { return in_slices_; }

  void fill(int64_t chunk, const Staging& staging) override {
    const Range part = chunk_range(chunk, staging);
    if (!in_slices_) return copy(staging.own(), input_at(part.first), part.size);
    for (int peer = 0; peer < staging.num_ranks(); ++peer) {
      if (peer == staging.rank()) continue;  // this rank takes its own slice from the input
      const Range slice = slice_range(peer, part, staging);
      copy(staging.own() + bytes_of(slice.first), input_at(part.first + slice.first), slice.size);
    }
  }

  void combine(int64_t chunk, const Staging& staging) override {
    const Range part = chunk_range(chunk, staging);
    const Range slice = slice_range(staging.rank(), part, staging);
    const size_t offset = bytes_of(slice.first);
    reduce_into(staging.own() + offset,
                input_at(part.first + slice.first),
                offset,
                slice.size,
                staging,
                output_at(part.first + slice.first));
  }

  void drain(int64_t chunk, const Staging& staging) override {
    const Range part = chunk_range(chunk, staging);
    if (!in_slices_) {
      return reduce_into(output_at(part.first), input_at(part.first), 0, part.size, staging);
    }
    for (int peer = 0; peer < staging.num_ranks(); ++peer) {
      if (peer == staging.rank()) continue;  // combine() has put this rank's slice there
      const Range slice = slice_range(peer, part, staging);
      copy(output_at(part.first + slice.first),
           staging.of(peer) + bytes_of(slice.first),
           slice.size);
    }
  }

 private:
  Range chunk_range(int64_t chunk, const Staging& staging) const {
    return range_of(chunk, elements_in(staging.num_bytes()), input_.num_elements);
  }
  // The part of a chunk that `rank` reduces, in whole cache lines.
  Range slice_range(int rank, const Range& part, const Staging& staging) const {
    const int64_t line = elements_in(64);
    const int64_t slice = ceil_div(ceil_div(part.size, staging.num_ranks()), line) * line;
    return range_of(rank, slice, part.size);
  }
  const std::byte* input_at(int64_t element) const { return input_.data + bytes_of(element); }
  std::byte* output_at(int64_t element) const { return output_.data + bytes_of(element); }

  const Input input_;
  const Output output_;
  const bool in_slices_;
};

class Reduce final : public Reduction {
 public:
  Reduce(SignatureHead head, Input input, Output output, bool is_root)
      : Reduction(head, {}, {}), input_(input), output_(output), is_root_(is_root) {}

 protected:
  int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    return std::max<int64_t>(1, ceil_div(input_.num_elements, elements_in(staging_bytes)));
  }

  void fill(int64_t chunk, const Staging& staging) override {
    if (is_root_) return;
    const Range part = chunk_range(chunk, staging);
    copy(staging.own(), input_.data + bytes_of(part.first), part.size);
  }

  void drain(int64_t chunk, const Staging& staging) override {
    if (!is_root_) return;
    const Range part = chunk_range(chunk, staging);
    const size_t offset = bytes_of(part.first);
    reduce_into(output_.data + offset, input_.data + offset, 0, part.size, staging);
  }

 private:
  Range chunk_range(int64_t chunk, const Staging& staging) const {
    return range_of(chunk, elements_in(staging.num_bytes()), input_.num_elements);
  }

  const Input input_;
  const Output output_;
  const bool is_root_;
};

class ReduceScatter final : public Reduction {
 public:
  ReduceScatter(SignatureHead head,
                std::vector<int64_t> gives,
                std::vector<int64_t> expects,
                std::vector<Input> inputs,
                Output output)
      : Reduction(head, std::move(gives), std::move(expects)),
        inputs_(std::move(inputs)),
        output_(output) {}

 protected:
  int64_t num_chunks(size_t staging_bytes, int /*num_ranks*/) const override {
    int64_t most = 1;
    for (const Input& input : inputs_) {
      most = std::max(most, ceil_div(input.num_elements, part_elements(staging_bytes)));
    }
    return most;
  }

  void fill(int64_t chunk, const Staging& staging) override {
    for (size_t peer = 0; peer < inputs_.size(); ++peer) {
      if (static_cast<int>(peer) == staging.rank()) continue;
      const Range part = part_range(chunk, inputs_[peer].num_elements, staging);
      copy(staging.own() + part_offset(peer, staging),
           inputs_[peer].data + bytes_of(part.first),
           part.size);
    }
  }

  void drain(int64_t chunk, const Staging& staging) override {
    const auto rank = static_cast<size_t>(staging.rank());
    const Range part = part_range(chunk, output_.num_elements, staging);
    const size_t first = bytes_of(part.first);
    reduce_into(output_.data + first,
                inputs_[rank].data + first,
                part_offset(rank, staging),
                part.size,
                staging);
  }

 private:
  // A buffer holds a part for each rank, in whole cache lines.
  int64_t part_elements(size_t staging_bytes) const {
    return elements_in(staging_bytes / inputs_.size() / 64 * 64);
  }
  size_t part_offset(size_t rank, const Staging& staging) const {
    return rank * bytes_of(part_elements(staging.num_bytes()));
  }
  Range part_range(int64_t chunk, int64_t num_elements, const Staging& staging) const {
    return range_of(chunk, part_elements(staging.num_bytes()), num_elements);
  }

  const std::vector<Input> inputs_;
  const Output output_;
};

SignatureHead head_of(Op op, ReduceOp reduce_op, const TensorFacts& facts, int root = -1) {
  SignatureHead head;
  head.op = op;
  head.reduce_op = reduce_op;
  head.root = root;
  set_shape(head, facts);
  return head;
}

}  // namespace

CollectivePtr make_all_reduce(const TensorFacts& facts, ReduceOp op, Input input, Output output) {
  return std::make_shared<AllReduce>(head_of(Op::kAllReduce, op, facts), input, output);
}

CollectivePtr make_reduce(
    const TensorFacts& facts, ReduceOp op, Input input, Output output, int root, int rank) {
  return std::make_shared<Reduce>(
      head_of(Op::kReduce, op, facts, root), input, output, rank == root);
}

CollectivePtr make_reduce_scatter(
    DType dtype, ReduceOp op, std::vector<Input> inputs, Output output, int rank) {
  SignatureHead head;
  head.op = Op::kReduceScatter;
  head.reduce_op = op;
  head.dtype = dtype;
  std::vector<int64_t> gives;
  for (const Input& input : inputs) {
    gives.push_back(input.num_elements);
    head.num_elements += input.num_elements;
  }
  std::vector<int64_t> expects(inputs.size(), 0);
  expects[static_cast<size_t>(rank)] = output.num_elements;
  return std::make_shared<ReduceScatter>(
      head, std::move(gives), std::move(expects), std::move(inputs), output);
}

}  // namespace weft::collectives
