#pragma once

// A link: two backends between this rank and one other of a group, one for each direction, which
// carry the tensors of messages from device to device, where they would stop in host memory
// otherwise. NCCL, which this is for, knows no tags: what is sent first is received first. So the
// sender announces each message on the host, in the group, and the receiver asks for what was
// announced, in that order, whichever message it waits for. With one backend for both directions a
// receive that waits would hold up the sends behind it.
//
// An announcement is the message's header, followed by the shapes and dtypes where they are new.
//
// Thread safety: all of it.

#include "group.h"
#include "pipeline_header.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::ops {

class PipelineLink {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Pending = std::vector<PendingCollective>;

  // For errors: the operator, and which message it is about.
  struct Context {
    std::string_view op;
    std::string what;
  };
  struct Arrival {
    PipelineHeader header;
    bool is_direct = false;           // or its tensors travel in the group, as without a link
    std::vector<at::Tensor> tensors;  // not to be read before `on_their_way` was waited for
    Pending on_their_way;
    std::optional<c10::Stream> stream;  // that the tensors were made for
  };

  // Both are backends over two ranks, of which the lower one in the group is rank 0.
  PipelineLink(int peer, c10::Device device, BackendPtr outgoing, BackendPtr incoming);

  const c10::Device& device() const { return device_; }

  // One byte each way, which makes connections. Blocks until the peer has called it.
  void open(const ProcessGroupPtr& group);
  // The peer does so, too. After a failure, which the peer may never answer, it aborts.
  void shut_down(const ProcessGroupPtr& group);

  // Sends the contiguous tensors of a message, on device() if it `is_direct`, and announces it.
  Pending send(const Context& context,
               const ProcessGroupPtr& group,
               const PipelineHeader& header,
               bool is_answer,
               bool is_direct,
               const std::vector<at::Tensor>& tensors);

  // The message of this number, once it was announced. After a failure here nothing that has not
  // come is taken any more, and after one in send() nothing is sent: it would meet what has failed.
  Arrival take(const Context& context,
               const ProcessGroupPtr& group,
               std::int64_t channel,
               std::uint64_t sequence,
               bool is_answer);

 private:
  using Key = std::tuple<std::int64_t, std::uint64_t, bool>;  // channel, sequence, is an answer
  struct Layout {
    at::ScalarType dtype;
    std::vector<std::int64_t> sizes;
  };

  Pending send_now(const Context& context,
                   const ProcessGroupPtr& group,
                   const PipelineHeader& header,
                   bool is_answer,
                   bool is_direct,
                   const std::vector<at::Tensor>& tensors);
  std::pair<Key, Arrival> next_arrival(const Context& context, const ProcessGroupPtr& group);
  void read_layouts(const Context& context,
                    const ProcessGroupPtr& group,
                    std::uint64_t layout,
                    std::uint64_t num_numbers);
  PendingCollective tell(const Context& context,
                         const ProcessGroupPtr& group,
                         bool sends,
                         const at::Tensor& bytes,
                         int tag) const;
  Pending carry(const Context& context,
                const ProcessGroupPtr& group,
                bool sends,
                const std::vector<at::Tensor>& tensors) const;

  const int peer_;
  const c10::Device device_;
  const BackendPtr outgoing_;
  const BackendPtr incoming_;
  // What arrives waits for no computation of this rank: it has a stream of its own. CPUs have none.
  const c10::Stream receiving_;

  std::mutex sending_;  // of what is sent and then announced
  std::optional<std::string> sending_failed_;
  std::uint64_t next_sent_ = 0;
  std::set<std::uint64_t> told_layouts_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::optional<std::string> reading_failed_;
  bool is_reading_ = false;  // one thread does, without the lock; what it has read is its own then
  std::uint64_t next_read_ = 0;
  std::map<std::uint64_t, std::vector<Layout>> layouts_;
  std::map<Key, Arrival> arrived_;
};

// Refuses a `peer` that is no other rank of the group, and a group that says nothing on the host.
void check_peer(std::string_view op, const ProcessGroupPtr& group, std::int64_t peer);

// The link to `peer`; null where there is none.
std::shared_ptr<PipelineLink> link_to(const ProcessGroupPtr& group, int peer);

}  // namespace weft::ops
