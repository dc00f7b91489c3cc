// Multi-host collectives that reduce. Partial results are communicated in the accumulation dtype
// and rounded once; an average is a sum until the partial results of the hosts are combined.
#include "convert.h"
#include "cross_host.h"
#include "ranges.h"
#include "reduce.h"

#include <algorithm>
#include <utility>

namespace weft::collectives {

namespace {

// all_reduce and reduce process a tensor in chunks of at most this many bytes of the accumulation
// dtype, so that a leader holds one chunk per host. reduce_scatter has no chunks: a leader holds
// its partial result for the full input, and from each other host the partial results of the
// segments that belong to the leader's host.
constexpr size_t kChunkBytes = size_t{8} << 20;

// Between three or more hosts, chunks of at least this size are all-reduced by a reduce-scatter and
// an all-gather between the leaders. For smaller chunks, each leader sends its full partial result
// to every other leader: fewer steps, and more bytes.
constexpr size_t kSegmentedBytes = size_t{64} << 10;

ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

}  // namespace

void CrossHost::reduce_on_host(const std::byte* in, std::byte* out, int64_t num_elements) {
  run_on_host(reduce_call({accumulation_dtype_, {num_elements}},
                          partial_op(call_.header.reduce_op),
                          {in, num_elements},
                          {out, num_elements},
                          0,
                          local_rank()));
}

std::byte* CrossHost::receive_buffer(size_t num_bytes) {
  const size_t needed = static_cast<size_t>(layout_.num_hosts() - 1) * num_bytes;
  if (received_.num_bytes() < needed) received_ = Scratch(needed);
  return received_.data();
}

void CrossHost::combine(const std::byte* received,
                        const std::byte* own,
                        std::byte* out,
                        int64_t num_elements) const {
  std::vector<const std::byte*> sources;
  for (int host = 0; host < layout_.num_hosts(); ++host) {
    if (host == layout_.own_host()) {
      sources.push_back(own);
    } else {
      sources.push_back(received);
      received += accumulation_bytes(num_elements);
    }
  }
  collectives::reduce(
      call_.header.reduce_op, accumulation_dtype_, out, sources, num_elements, layout_.num_ranks());
}

void CrossHost::reduce_on_leader_of(int host, std::byte* partial, int64_t num_elements) {
  const size_t num_bytes = accumulation_bytes(num_elements);
  const bool is_receiver = host == layout_.own_host();
  std::byte* const received = is_receiver ? receive_buffer(num_bytes) : nullptr;
  std::byte* next = received;
  exchange_with_leaders([&](TransferSet& transfers, int other_host, int leader) {
    if (other_host == host) transfers.send(leader, partial, num_bytes);
    if (!is_receiver) return;
    transfers.receive(leader, next, num_bytes);
    next += num_bytes;
  });
  if (is_receiver) combine(received, partial, partial, num_elements);
}

void CrossHost::all_reduce_between_leaders(std::byte* partial, int64_t num_elements) {
  const size_t num_bytes = accumulation_bytes(num_elements);
  if (layout_.num_hosts() > 2 && num_bytes >= kSegmentedBytes) {
    return all_reduce_in_segments(partial, num_elements);
  }
  std::byte* const received = receive_buffer(num_bytes);
  std::byte* next = received;
  exchange_with_leaders([&](TransferSet& transfers, int /*host*/, int leader) {
    transfers.receive(leader, next, num_bytes);
    transfers.send(leader, partial, num_bytes);
    next += num_bytes;
  });
  combine(received, partial, partial, num_elements);
}

// Segment h of the chunk belongs to the leader of host h. Reduce-scatter: each leader receives its
// segment of all partial results and reduces it. All-gather: each leader sends its reduced segment
// to the others.
void CrossHost::all_reduce_in_segments(std::byte* partial, int64_t num_elements) {
  const auto segment_of = [&](int host) {
    const auto segment = range_at<int64_t>(
        host, num_elements, num_ranges<int64_t>(num_elements, layout_.num_hosts()));
    return Output{partial + accumulation_bytes(segment.first), segment.size};
  };
  const Output own = segment_of(layout_.own_host());
  const size_t own_bytes = accumulation_bytes(own.num_elements);
  std::byte* const received = receive_buffer(own_bytes);
  std::byte* next = received;
  exchange_with_leaders([&](TransferSet& transfers, int host, int leader) {
    const Output segment = segment_of(host);
    transfers.receive(leader, next, own_bytes);
    transfers.send(leader, segment.data, accumulation_bytes(segment.num_elements));
    next += own_bytes;
  });
  combine(received, own.data, own.data, own.num_elements);
  exchange_with_leaders([&](TransferSet& transfers, int host, int leader) {
    const Output segment = segment_of(host);
    transfers.receive(leader, segment.data, accumulation_bytes(segment.num_elements));
    transfers.send(leader, own.data, own_bytes);
  });
}

template <typename DoChunk>
void CrossHost::in_chunks(bool has_result, const DoChunk& do_chunk) {
  const DType dtype = call_.header.dtype;
  const int64_t num_elements = input().num_elements;
  const auto chunk_elements = static_cast<int64_t>(kChunkBytes / size_of(accumulation_dtype_));
  const size_t buffer_bytes = accumulation_bytes(std::min(num_elements, chunk_elements));
  const Scratch widened_input(converts() ? buffer_bytes : 0);
  // Without a conversion the result is written to the output directly.
  const bool needs_buffer = converts() || !has_result;
  const Scratch buffer(needs_buffer ? buffer_bytes : 0);
  for (int64_t chunk = 0; chunk < num_ranges(num_elements, chunk_elements); ++chunk) {
    const auto range = range_at(chunk, num_elements, chunk_elements);
    const std::byte* in = input().data + call_.bytes_of(range.first);
    if (converts()) {
      widen(dtype, in, widened_input.data(), range.size);
      in = widened_input.data();
    }
    std::byte* const result = has_result ? output().data + call_.bytes_of(range.first) : nullptr;
    std::byte* const out = needs_buffer ? buffer.data() : result;
    do_chunk(in, out, range.size);
    if (has_result && converts()) narrow(dtype, out, result, range.size);
  }
}

void CrossHost::all_reduce() {
  in_chunks(true, [&](const std::byte* in, std::byte* out, int64_t num_elements) {
    reduce_on_host(in, out, num_elements);
    if (layout_.is_leader()) all_reduce_between_leaders(out, num_elements);
    broadcast_on_host(out, accumulation_bytes(num_elements));
  });
}

void CrossHost::reduce() {
  const int root_host = layout_.host_of(root());
  const bool is_root = root() == layout_.own_rank;
  in_chunks(is_root, [&](const std::byte* in, std::byte* out, int64_t num_elements) {
    reduce_on_host(in, out, num_elements);
    if (layout_.is_leader()) reduce_on_leader_of(root_host, out, num_elements);
    const bool is_on_root_host = root_host == layout_.own_host();
    if (is_on_root_host && layout_.leader_of(root_host) != root()) {
      broadcast_on_host(out, accumulation_bytes(num_elements));
    }
  });
}

void CrossHost::reduce_scatter() {
  // The segments of all ranks, ordered by host: the segments of a host are contiguous.
  std::vector<int> order;
  std::vector<Range<int64_t>> segments_on;  // by host, in elements
  const auto elements_of = [&](int rank) { return input_of(rank).num_elements; };
  int64_t num_elements = 0;
  for (const std::vector<int>& on_host : layout_.ranks_by_host) {
    const int64_t first = num_elements;
    for (const int rank : on_host) {
      order.push_back(rank);
      num_elements += elements_of(rank);
    }
    segments_on.push_back({first, num_elements - first});
  }
  const Scratch partial(layout_.is_leader() ? accumulation_bytes(num_elements) : 0);
  Scratch widened_input;
  size_t offset = 0;
  for (const int rank : order) {
    const Input& input = input_of(rank);
    const std::byte* in = input.data;
    if (converts()) {
      const size_t num_bytes = accumulation_bytes(input.num_elements);
      if (widened_input.num_bytes() < num_bytes) widened_input = Scratch(num_bytes);
      widen(call_.header.dtype, in, widened_input.data(), input.num_elements);
      in = widened_input.data();
    }
    reduce_on_host(in, partial.data() + (layout_.is_leader() ? offset : 0), input.num_elements);
    offset += accumulation_bytes(input.num_elements);
  }

  std::byte* own_segments = nullptr;  // of the ranks of this host, on its leader only
  if (layout_.is_leader()) {
    const Range<int64_t> own = segments_on[static_cast<size_t>(layout_.own_host())];
    own_segments = partial.data() + accumulation_bytes(own.first);
    std::byte* const received = receive_buffer(accumulation_bytes(own.size));
    std::byte* next = received;
    exchange_with_leaders([&](TransferSet& transfers, int host, int leader) {
      const Range<int64_t> theirs = segments_on[static_cast<size_t>(host)];
      transfers.receive(leader, next, accumulation_bytes(own.size));
      transfers.send(leader,
                     partial.data() + accumulation_bytes(theirs.first),
                     accumulation_bytes(theirs.size));
      next += accumulation_bytes(own.size);
    });
    combine(received, own_segments, own_segments, own.size);
  }

  std::vector<Input> inputs;
  if (layout_.is_leader()) {
    for (const int rank : layout_.own_ranks()) {
      inputs.push_back({own_segments, elements_of(rank)});
      own_segments += accumulation_bytes(elements_of(rank));
    }
  }
  const Output result = output();
  const Scratch accumulated_result(converts() ? accumulation_bytes(result.num_elements) : 0);
  std::byte* const target = converts() ? accumulated_result.data() : result.data;
  run_on_host(scatter_call(accumulation_dtype_,
                           std::move(inputs),
                           {target, result.num_elements},
                           0,
                           local_rank(),
                           local_group_.options().size));
  if (converts()) narrow(call_.header.dtype, target, result.data, result.num_elements);
}

}  // namespace weft::collectives
