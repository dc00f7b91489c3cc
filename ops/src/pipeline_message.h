#pragma once

// Messages between two ranks of a group: lists of tensors on numbered channels, several on their
// way at a time. They are numbered, by channel and direction, on both sides alike. A message is a
// header of 64 bytes followed by the tensors; where some are differentiable it is answered by
// their gradients.
//
// Tensors of other devices travel through host memory, or over a link (pipeline_link.h) where the
// two ranks have one and all tensors of the message are on its device. Everything here works below
// autograd.
//
// Thread safety: messages may be posted, waited for and answered on different threads, each of
// them on one at a time.

#include "group.h"
#include "pipeline_header.h"
#include "pipeline_link.h"
#include "pipeline_wire.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace weft::ops {

struct PipelineAddress {
  ProcessGroupPtr group;
  int peer;
  std::int64_t channel;
};

// One message and its answer, seen from one side.
// Errors of what waits: CollectiveMismatchError where the sides do not agree: on the backend of
// weft, whose group has failed then, on both; on others the sender finds out when it waits for the
// gradients. ValueError for a second wait or a second backward. Those of the backend.
class PipelineMessage final : public torch::CustomClassHolder {
 public:
  enum class Side { kSender, kReceiver };

  // Posts the message. `tensors` are sent, or have the shapes, dtypes and devices of what is to be
  // received. `differentiable`: one flag for each.
  static c10::intrusive_ptr<PipelineMessage> post(Side side,
                                                  PipelineAddress address,
                                                  const std::vector<at::Tensor>& tensors,
                                                  const std::vector<bool>& differentiable);

  // Waits until all that this rank has sent in the group has left; over a link the current stream
  // does.
  static void flush(const ProcessGroupPtr& group);

  PipelineMessage(Side side, PipelineAddress address);

  Side side() const { return side_; }
  const PipelineAddress& address() const { return address_; }
  std::size_t num_tensors() const { return layouts_.size(); }
  bool is_differentiable(std::size_t tensor_idx) const;
  bool is_differentiable() const;  // any of them

  // Receiver: the tensors that came; once. Sender: empty, as soon as what was sent may be changed
  // again; over a link by work on the current stream.
  std::vector<at::Tensor> wait();

  // Receiver: answers with the gradients of the differentiable tensors, in their order; once.
  void send_gradients(const std::vector<at::Tensor>& gradients);
  // Sender: that answer; once.
  std::vector<at::Tensor> receive_gradients();

 private:
  using Layouts = std::vector<TensorLayout>;

  Layouts gradient_layouts() const;
  PipelineHeader header_of(const Layouts& layouts, PipelineHeader::Kind kind) const;

  struct Outgoing {
    std::vector<at::Tensor> tensors;  // contiguous, where they are sent from
    bool is_direct = false;           // from device to device
  };
  Outgoing outgoing(const std::vector<at::Tensor>& tensors) const;
  void send(const PipelineHeader& header, const Outgoing& message, bool is_answer);
  void start_receiving_header(bool is_answer);
  void start_receiving(const Layouts& layouts, bool is_answer);
  // Waits for the header and checks it; the peer is told where it is not what is expected.
  void expect_header(const PipelineHeader& expected);
  // The tensors of the message whose header came, on the devices of `layouts`.
  std::vector<at::Tensor> received(const Layouts& layouts, bool is_answer);
  std::vector<at::Tensor> received_directly(const Layouts& layouts);

  PendingCollective start(bool sends, const at::Tensor& bytes, bool is_answer);
  void exchange(bool sends, const at::Tensor& bytes, bool is_answer);
  void check_first_answer();
  void wait_for_exchanges();
  // Whether no sent tensor is in flight any more; what has left is let go.
  bool is_finished();
  std::string name() const;  // "message 3 on channel 0 from rank 0 to rank 1"

  const Side side_;
  const PipelineAddress address_;
  const std::shared_ptr<PipelineLink> link_;  // null where there is none
  Layouts layouts_;
  std::uint64_t sequence_ = 0;
  std::string_view op_;
  bool is_received_ = false;
  bool is_answered_ = false;
  at::Tensor header_;  // [64] bytes, of the message or, on the sender's side, of its answer
  PendingCollective header_on_its_way_;
  std::vector<at::Tensor> arriving_;  // on the host
  PipelineLink::Arrival arrival_;     // where there is a link
  std::mutex mutex_;                  // of exchanges_
  std::vector<PendingCollective> exchanges_;
};

}  // namespace weft::ops
