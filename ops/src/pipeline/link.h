#pragma once

// A link: two backends between this rank and one peer of a group, one per direction, which carry
// the tensors of messages from device to device instead of through host memory. The backends are
// usually NCCL, which has no tags: it matches sends and receives in order. The sender therefore
// announces each message on the host, over the group's CPU backend, and the receiver posts receives
// in the order of the announcements, whichever message it waits for. With one backend for both
// directions, a pending receive would block the sends behind it.
//
// An announcement contains the message's header. The dtypes and shapes of the tensors follow it
// when their layout is sent over the link for the first time.

#include "../group.h"
#include "wire.h"

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

// Thread-safe.
class PipelineLink {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Pending = std::vector<PendingCollective>;

  // For error messages: the operator and the message it handles.
  struct Context {
    std::string_view op;
    std::string what;
  };
  struct ReceivedMessage {
    PipelineHeader header;
    bool is_direct = false;           // false: the tensors come over the group, as without a link
    std::vector<at::Tensor> tensors;  // wait for `pending` before reading them
    Pending pending;
    std::optional<c10::Stream> stream;  // the stream that the tensors were allocated on
  };

  // Both backends are over two ranks; the lower rank of the group is their rank 0.
  PipelineLink(int peer, c10::Device device, BackendPtr outgoing, BackendPtr incoming);

  const c10::Device& device() const { return device_; }

  // Sends one byte each way to establish the connections. Blocks until the peer calls open().
  void open(const ProcessGroupPtr& group);
  // Must be called on both sides. After a failure, aborts the backends, because the peer may not
  // respond.
  void shut_down(const ProcessGroupPtr& group);

  // Announces a message. `is_answer`: the message is an answer, see message.h. If `is_direct`, also
  // sends its tensors, which are contiguous and on device(); otherwise the caller sends them over
  // the group.
  Pending send(const Context& context,
               const ProcessGroupPtr& group,
               const PipelineHeader& header,
               bool is_answer,
               bool is_direct,
               const std::vector<at::Tensor>& tensors);

  // Waits for the announcement of a message and returns the message, whose tensors are in flight.
  // After a failure in take(), only messages whose announcements were read before the failure can
  // be taken. After a failure in send(), no message can be sent: a later message would be matched
  // with the failed one.
  ReceivedMessage take(const Context& context,
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
  std::pair<Key, ReceivedMessage> receive_next(const Context& context,
                                               const ProcessGroupPtr& group);
  void read_layouts(const Context& context,
                    const ProcessGroupPtr& group,
                    std::uint64_t layout_hash,
                    std::uint64_t layouts_length);
  PendingCollective exchange_bytes(const Context& context,
                                   const ProcessGroupPtr& group,
                                   bool sends,
                                   const at::Tensor& bytes,
                                   int tag) const;
  Pending transfer(const Context& context,
                   const ProcessGroupPtr& group,
                   bool sends,
                   const std::vector<at::Tensor>& tensors) const;

  const int peer_;
  const c10::Device device_;
  const BackendPtr outgoing_;
  const BackendPtr incoming_;
  // Receives have a stream of their own, so that they do not wait for computation. No effect on
  // CPUs.
  const c10::Stream receive_stream_;

  // Guards the next three members, and makes sending and announcing a message one step.
  std::mutex send_mutex_;
  std::optional<std::string> send_failure_;
  std::uint64_t next_sent_ = 0;           // number of the next announcement
  std::set<std::uint64_t> sent_layouts_;  // by layout_hash of the header

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::optional<std::string> read_failure_;
  // One thread at a time reads announcements, without the lock; it owns next_read_ and layouts_.
  bool is_reading_ = false;
  std::uint64_t next_read_ = 0;
  std::map<std::uint64_t, std::vector<Layout>> layouts_;  // by layout_hash of the header
  std::map<Key, ReceivedMessage> received_;
};

// Raises ValueError for a `peer` that is not another rank of the group, and for a group without a
// CPU backend.
void check_peer(std::string_view op, const ProcessGroupPtr& group, std::int64_t peer);

// Returns the link to `peer`, or null.
std::shared_ptr<PipelineLink> link_to(const ProcessGroupPtr& group, int peer);

}  // namespace weft::ops
