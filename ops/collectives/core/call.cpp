#include "call.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <utility>

namespace weft::collectives {

namespace {

template <typename List>
std::vector<int64_t> counts_of(const List& list) {
  std::vector<int64_t> counts;
  counts.reserve(list.size());
  for (const auto& item : list) counts.push_back(item.num_elements);
  return counts;
}

// Returns zeros with `count` at `index`.
std::vector<int64_t> only_at(int index, int64_t count, size_t num_ranks) {
  std::vector<int64_t> counts(num_ranks, 0);
  counts[static_cast<size_t>(index)] = count;
  return counts;
}

std::vector<int64_t> zeros(int num_ranks) {
  return std::vector<int64_t>(static_cast<size_t>(num_ranks), 0);
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Returns a hash of the dims for which the header has no room; ranks compare the hash instead of
// these dims.
int64_t digest(std::span<const int64_t> sizes) {
  uint64_t hash = 0;
  for (const int64_t size : sizes)
    hash = hash * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(size);
  return static_cast<int64_t>(hash);
}

SignatureHeader header_of(Op op, DType dtype, int64_t num_elements, int root = -1) {
  SignatureHeader header;
  header.op = op;
  header.dtype = dtype;
  header.num_elements = num_elements;
  header.root = root;
  return header;
}

SignatureHeader header_of(Op op, const TensorFacts& facts, int root = -1) {
  const int64_t num_elements =
      std::accumulate(facts.shape.begin(), facts.shape.end(), int64_t{1}, std::multiplies<>());
  SignatureHeader header = header_of(op, facts.dtype, num_elements, root);
  header.num_dims = static_cast<uint8_t>(facts.shape.size());
  const bool has_rest = facts.shape.size() > SignatureHeader::kMaxDims;
  const size_t num_listed = has_rest ? SignatureHeader::kMaxDims - 1 : facts.shape.size();
  std::copy_n(facts.shape.begin(), num_listed, header.shape.begin());
  if (has_rest) header.shape.back() = digest(std::span(facts.shape).subspan(num_listed));
  return header;
}

SignatureHeader with_reduce_op(ReduceOp op, SignatureHeader header) {
  header.reduce_op = op;
  return header;
}

}  // namespace

CollectiveCall barrier_call() { return {}; }

CollectiveCall all_reduce_call(const TensorFacts& facts, ReduceOp op, Input input, Output output) {
  return {with_reduce_op(op, header_of(Op::kAllReduce, facts)), {}, {}, {input}, {output}};
}

CollectiveCall reduce_call(
    const TensorFacts& facts, ReduceOp op, Input input, Output output, int root, int rank) {
  CollectiveCall call{with_reduce_op(op, header_of(Op::kReduce, facts, root)), {}, {}, {input}, {}};
  if (rank == root) call.outputs = {output};
  return call;
}

CollectiveCall reduce_scatter_call(
    DType dtype, ReduceOp op, std::vector<Input> inputs, Output output, int rank) {
  auto send_counts = counts_of(inputs);
  auto receive_counts = only_at(rank, output.num_elements, inputs.size());
  const SignatureHeader header = header_of(Op::kReduceScatter, dtype, total(send_counts));
  return {with_reduce_op(op, header),
          std::move(send_counts),
          std::move(receive_counts),
          std::move(inputs),
          {output}};
}

CollectiveCall broadcast_call(const TensorFacts& facts, Output tensor, int root, int rank) {
  CollectiveCall call{header_of(Op::kBroadcast, facts, root), {}, {}, {}, {}};
  if (rank == root) {
    call.inputs = {{tensor.data, tensor.num_elements}};
  } else {
    call.outputs = {tensor};
  }
  return call;
}

CollectiveCall all_gather_call(DType dtype, Input input, std::vector<Output> outputs) {
  std::vector<int64_t> send_counts(outputs.size(), input.num_elements);
  auto receive_counts = counts_of(outputs);
  return {header_of(Op::kAllGather, dtype, input.num_elements),
          std::move(send_counts),
          std::move(receive_counts),
          {input},
          std::move(outputs)};
}

CollectiveCall gather_call(
    DType dtype, Input input, std::vector<Output> outputs, int root, int rank, int num_ranks) {
  auto send_counts = only_at(root, input.num_elements, static_cast<size_t>(num_ranks));
  auto receive_counts = rank == root ? counts_of(outputs) : zeros(num_ranks);
  return {header_of(Op::kGather, dtype, input.num_elements, root),
          std::move(send_counts),
          std::move(receive_counts),
          {input},
          std::move(outputs)};
}

CollectiveCall scatter_call(
    DType dtype, std::vector<Input> inputs, Output output, int root, int rank, int num_ranks) {
  auto send_counts = rank == root ? counts_of(inputs) : zeros(num_ranks);
  auto receive_counts = only_at(root, output.num_elements, static_cast<size_t>(num_ranks));
  const SignatureHeader header = header_of(Op::kScatter, dtype, total(send_counts), root);
  return {header, std::move(send_counts), std::move(receive_counts), std::move(inputs), {output}};
}

CollectiveCall all_to_all_call(DType dtype,
                               std::vector<Input> inputs,
                               std::vector<Output> outputs) {
  auto send_counts = counts_of(inputs);
  auto receive_counts = counts_of(outputs);
  const SignatureHeader header = header_of(Op::kAllToAll, dtype, total(send_counts));
  return {header,
          std::move(send_counts),
          std::move(receive_counts),
          std::move(inputs),
          std::move(outputs)};
}

CollectiveCall sparse_all_reduce_call(const TensorFacts& facts,
                                      int num_sparse_dims,
                                      int64_t num_entries,
                                      Input entries,
                                      MakeOutputs make_outputs) {
  SignatureHeader header = with_reduce_op(ReduceOp::kSum, header_of(Op::kSparseAllReduce, facts));
  header.num_sparse_dims = num_sparse_dims;
  header.num_elements = num_entries;
  CollectiveCall call{header, {}, {}, {entries}, {}};
  call.make_outputs = std::move(make_outputs);
  return call;
}

}  // namespace weft::collectives
