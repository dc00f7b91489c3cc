// The common steps of multi-host collectives, and the collectives that do not reduce.
#include "cross_host.h"

#include "convert.h"
#include "ranges.h"

#include <algorithm>
#include <utility>

namespace weft::collectives {

namespace {

// The ranks of a late rank's host detect which rank is late, and name it in their error. To receive
// that error, leaders wait for other hosts longer than the timeout by this time, ranks that wait
// for their leader by twice this time, and ranks that wait for any rank of another host by three
// times this time.
constexpr std::chrono::milliseconds kGrace{500};

}  // namespace

CrossHost::CrossHost(Engine& local_group,
                     ThreadSafeTransport& transport,
                     const HostLayout& layout,
                     const CollectiveCall& call,
                     std::string what,
                     std::chrono::milliseconds timeout,
                     Deadline deadline)
    : local_group_(local_group),
      transport_(transport),
      layout_(layout),
      call_(call),
      what_(std::move(what)),
      timeout_(timeout),
      deadline_(deadline + kGrace),
      accumulation_dtype_(accumulation_dtype_of(call.header.dtype)) {}

void CrossHost::run() {
  const std::vector<int64_t> num_elements = compare_signatures();
  switch (call_.header.op) {
    case Op::kAllReduce:
      return all_reduce();
    case Op::kReduce:
      return reduce();
    case Op::kReduceScatter:
      return reduce_scatter();
    case Op::kAllGather:
      return all_gather(call_.header.dtype, call_.outputs);
    case Op::kBroadcast:
      return broadcast();
    case Op::kGather:
      return gather();
    case Op::kScatter:
      return scatter();
    case Op::kAllToAll:
      return all_to_all();
    case Op::kBarrier:
      return;  // compare_signatures() has waited for all ranks
    case Op::kSparseAllReduce:
      return all_gather(DType::kUInt8, call_.make_outputs(num_elements));
  }
}

void CrossHost::run_on_host(CollectiveCall step) {
  step.purpose = what_;
  const OperationPtr operation = local_group_.make(std::move(step));
  // Once all ranks of a host have arrived, those that are not the leader wait for the leader, which
  // waits for other hosts.
  if (all_arrived_ && !layout_.is_leader()) operation->grace = 2 * kGrace;
  operation->timeout = timeout_;
  local_group_.submit(operation, false);
  local_group_.wait(*operation, std::chrono::milliseconds(0));
  if (operation->error()) std::rethrow_exception(operation->error());
}

Deadline CrossHost::point_to_point_deadline() const { return deadline_ + 2 * kGrace; }

void CrossHost::broadcast_on_host(std::byte* data, size_t num_bytes) {
  const auto size = static_cast<int64_t>(num_bytes);
  run_on_host(broadcast_call({DType::kUInt8, {size}}, {data, size}, 0, local_rank()));
}

template <typename List>
List CrossHost::of_own_ranks(const List& by_rank) const {
  List own;
  for (const int rank : layout_.own_ranks()) own.push_back(by_rank[static_cast<size_t>(rank)]);
  return own;
}

// Compares the calls of all ranks. The record of a rank holds its signature: records are
// all-gathered within each host, the leaders exchange the records of their hosts, and each leader
// broadcasts all records within its host.
std::vector<int64_t> CrossHost::compare_signatures() {
  const auto num_ranks = static_cast<size_t>(layout_.num_ranks());
  const size_t record_bytes = sizeof(SignatureHeader) + 2 * num_ranks * sizeof(int64_t);
  std::vector<std::byte> records(num_ranks * record_bytes);  // grouped by host
  std::vector<std::byte*> record_of(num_ranks);
  std::byte* next = records.data();
  for (const auto& of_host : layout_.ranks_by_host) {
    for (const int rank : of_host) {
      record_of[static_cast<size_t>(rank)] = next;
      next += record_bytes;
    }
  }

  std::byte* const own = record_of[static_cast<size_t>(layout_.own_rank)];
  std::memcpy(own, &call_.header, sizeof call_.header);
  auto* const counts = reinterpret_cast<int64_t*>(own + sizeof call_.header);
  std::ranges::copy(call_.send_counts, counts);
  std::ranges::copy(call_.receive_counts, counts + num_ranks);

  const auto size = static_cast<int64_t>(record_bytes);
  std::vector<Output> outputs;
  for (const int rank : layout_.own_ranks()) {
    outputs.push_back({record_of[static_cast<size_t>(rank)], size});
  }
  run_on_host(all_gather_call(DType::kUInt8, {own, size}, std::move(outputs)));
  all_arrived_ = true;
  if (layout_.is_leader()) {
    exchange_with_leaders([&](TransferSet& transfers, int host, int leader) {
      transfers.receive(leader,
                        record_of[static_cast<size_t>(leader)],
                        layout_.ranks_on(host).size() * record_bytes);
      transfers.send(leader, own, layout_.own_ranks().size() * record_bytes);
    });
  }
  broadcast_on_host(records.data(), records.size());

  std::vector<Signature> by_rank;
  for (const std::byte* record : record_of) {
    Signature signature;
    std::memcpy(&signature.header, record, sizeof signature.header);
    const auto* numbers = reinterpret_cast<const int64_t*>(record + sizeof signature.header);
    const size_t num_counts = has_counts(signature.header.op) ? num_ranks : 0;
    signature.send_counts = {numbers, num_counts};
    signature.receive_counts = {numbers + num_ranks, num_counts};
    by_rank.push_back(signature);
  }
  if (auto text = mismatch(by_rank)) throw CollectiveMismatchError("in " + what_ + ", " + *text);
  return num_elements_of(by_rank);
}

void CrossHost::broadcast() {
  const bool is_root = root() == layout_.own_rank;
  std::byte* const data = is_root ? const_cast<std::byte*>(input().data) : output().data;
  const int64_t num_elements = is_root ? input().num_elements : output().num_elements;
  const size_t num_bytes = call_.bytes_of(num_elements);
  const int root_host = layout_.host_of(root());
  if (root_host == layout_.own_host()) {
    const auto size = static_cast<int64_t>(num_bytes);
    run_on_host(broadcast_call(
        {DType::kUInt8, {size}}, {data, size}, layout_.local_rank_of(root()), local_rank()));
  }
  if (layout_.is_leader()) {
    exchange_with_leaders([&](TransferSet& transfers, int host, int leader) {
      if (root_host == layout_.own_host()) transfers.send(leader, data, num_bytes);
      if (root_host == host) transfers.receive(leader, data, num_bytes);
    });
  }
  if (root_host != layout_.own_host()) broadcast_on_host(data, num_bytes);
}

void CrossHost::all_gather(DType dtype, const std::vector<Output>& outputs) {
  run_on_host(all_gather_call(dtype, input(), of_own_ranks(outputs)));
  if (layout_.is_leader()) {
    exchange_with_leaders([&](TransferSet& transfers, int host, int leader) {
      for (const int rank : layout_.ranks_on(host)) {
        receive_from(transfers, leader, outputs[static_cast<size_t>(rank)]);
      }
      for (const int rank : layout_.own_ranks()) {
        const Output& gathered = outputs[static_cast<size_t>(rank)];
        send_to(transfers, leader, {gathered.data, gathered.num_elements});
      }
    });
  }
  for_remote_ranks([&](int rank) {
    const Output& gathered = outputs[static_cast<size_t>(rank)];
    broadcast_on_host(gathered.data, call_.bytes_of(gathered.num_elements));
  });
}

void CrossHost::gather() {
  const bool is_root = root() == layout_.own_rank;
  auto transfers = transfers_with_deadline(point_to_point_deadline());
  if (!layout_.is_local(root())) {
    send_to(transfers, root(), input());
    return transfers.wait();
  }
  if (is_root) {
    for_remote_ranks([&](int rank) { receive_from(transfers, rank, output_of(rank)); });
  }
  run_on_host(gather_call(call_.header.dtype,
                          input(),
                          is_root ? of_own_ranks(call_.outputs) : std::vector<Output>(),
                          layout_.local_rank_of(root()),
                          local_rank(),
                          local_group_.options().size));
  transfers.wait();
}

void CrossHost::scatter() {
  const bool is_root = root() == layout_.own_rank;
  auto transfers = transfers_with_deadline(point_to_point_deadline());
  if (!layout_.is_local(root())) {
    receive_from(transfers, root(), output());
    return transfers.wait();
  }
  if (is_root) {
    for_remote_ranks([&](int rank) { send_to(transfers, rank, input_of(rank)); });
  }
  run_on_host(scatter_call(call_.header.dtype,
                           is_root ? of_own_ranks(call_.inputs) : std::vector<Input>(),
                           output(),
                           layout_.local_rank_of(root()),
                           local_rank(),
                           local_group_.options().size));
  transfers.wait();
}

void CrossHost::all_to_all() {
  auto transfers = transfers_with_deadline(point_to_point_deadline());
  for_remote_ranks([&](int rank) {
    receive_from(transfers, rank, output_of(rank));
    send_to(transfers, rank, input_of(rank));
  });
  run_on_host(
      all_to_all_call(call_.header.dtype, of_own_ranks(call_.inputs), of_own_ranks(call_.outputs)));
  transfers.wait();
}

}  // namespace weft::collectives
