#pragma once

// One multi-host collective from start to end. Within each host it runs as collectives of the
// host's engine. Between hosts, the leaders (the lowest rank of each host) exchange the data of
// reductions, all_gather and broadcast; in gather, scatter and all_to_all, ranks of different hosts
// send their data to each other directly. Partial results are reduced in rank order within a host,
// and in host order between hosts: runs with the same assignment of ranks to hosts give the same
// bits.

#include "engine.h"
#include "layout.h"
#include "scratch.h"
#include "thread_safe_transport.h"

namespace weft::collectives {

class CrossHost {
 public:
  // `what` names the collective in error messages.
  CrossHost(Engine& local_group,
            ThreadSafeTransport& transport,
            const HostLayout& layout,
            const CollectiveCall& call,
            std::string what,
            std::chrono::milliseconds timeout,
            Deadline deadline);

  // Blocks. Errors: CollectiveMismatchError, on every rank, when the calls do not match;
  // TransportError; the failure of `local_group`.
  void run();

 private:
  // Returns the number of elements in the header of each rank.
  std::vector<int64_t> compare_signatures();
  void broadcast();
  void all_reduce();
  void reduce();
  void reduce_scatter();
  // Gathers the input. dtype: of an element that bytes_of() counts.
  void all_gather(DType dtype, const std::vector<Output>& outputs);
  void gather();
  void scatter();
  void all_to_all();

  // Steps of a collective. Partial results are in the accumulation dtype.
  void run_on_host(CollectiveCall step);
  // Reduces the inputs of the ranks of this host into `out` of the leader.
  void reduce_on_host(const std::byte* in, std::byte* out, int64_t num_elements);
  // Broadcasts bytes from the leader to the ranks of this host.
  void broadcast_on_host(std::byte* data, size_t num_bytes);
  // Called on every leader: reduce the partial results of all hosts in place, on the leader of
  // `host` or on all leaders. all_reduce_between_leaders() reduces large partial results by
  // segments if there are three or more leaders.
  void reduce_on_leader_of(int host, std::byte* partial, int64_t num_elements);
  void all_reduce_between_leaders(std::byte* partial, int64_t num_elements);
  void all_reduce_in_segments(std::byte* partial, int64_t num_elements);
  // Returns a buffer for `num_bytes` from each other host, one after another in host order.
  std::byte* receive_buffer(size_t num_bytes);
  // Reduces the partial results of all hosts in host order: `own` is that of this host, `received`
  // holds those of the other hosts.
  void combine(const std::byte* received,
               const std::byte* own,
               std::byte* out,
               int64_t num_elements) const;
  // Calls do_chunk(input in the accumulation dtype, buffer for the result, number of elements) for
  // each chunk of the tensor; if `has_result`, writes the result to the output.
  template <typename DoChunk>
  void in_chunks(bool has_result, const DoChunk& do_chunk);

  size_t accumulation_bytes(int64_t num_elements) const {
    return static_cast<size_t>(num_elements) * size_of(accumulation_dtype_);
  }
  TransferSet transfers_with_deadline(Deadline deadline) {
    return {transport_, deadline, [this](int peer) { local_group_.publish_waiting(peer); }};
  }
  // The deadline of transfers between any two ranks, leaders or not.
  Deadline point_to_point_deadline() const;
  // On a leader: calls `exchange(transfers, host, leader)` for each other host, to post the
  // transfers with its leader, and waits for all of them.
  template <typename Exchange>
  void exchange_with_leaders(const Exchange& exchange) {
    auto transfers = transfers_with_deadline(deadline_);
    for (int host = 0; host < layout_.num_hosts(); ++host) {
      if (host != layout_.own_host()) exchange(transfers, host, layout_.leader_of(host));
    }
    transfers.wait();
  }
  // Calls visit(rank) for each rank of another host.
  template <typename Visit>
  void for_remote_ranks(const Visit& visit) const {
    for (int rank = 0; rank < layout_.num_ranks(); ++rank) {
      if (!layout_.is_local(rank)) visit(rank);
    }
  }
  void send_to(TransferSet& transfers, int peer, const Input& source) const {
    transfers.send(peer, source.data, call_.bytes_of(source.num_elements));
  }
  void receive_from(TransferSet& transfers, int peer, const Output& target) const {
    transfers.receive(peer, target.data, call_.bytes_of(target.num_elements));
  }
  bool converts() const { return accumulation_dtype_ != call_.header.dtype; }
  // Returns the entries of the ranks of this host.
  template <typename List>
  List of_own_ranks(const List& by_rank) const;
  Input input() const { return call_.inputs.front(); }
  Output output() const { return call_.outputs.front(); }
  // REQUIRES: the call has an input, or an output, for each rank.
  const Input& input_of(int rank) const { return call_.inputs[static_cast<size_t>(rank)]; }
  const Output& output_of(int rank) const { return call_.outputs[static_cast<size_t>(rank)]; }
  int root() const { return call_.header.root; }
  int local_rank() const { return local_group_.options().rank; }

  Engine& local_group_;
  ThreadSafeTransport& transport_;
  const HostLayout& layout_;
  const CollectiveCall& call_;
  const std::string what_;
  const std::chrono::milliseconds timeout_;
  const Deadline deadline_;
  const DType accumulation_dtype_;  // of partial results, see convert.h
  bool all_arrived_ = false;        // all ranks of this host have started this collective
  Scratch received_;
};

}  // namespace weft::collectives
