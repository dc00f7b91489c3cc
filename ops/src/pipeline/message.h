#pragma once

// Point-to-point messages between two ranks of a group: lists of tensors on numbered channels, with
// several in flight at a time. Both sides number the messages of a channel and direction from 0. A
// message is a header of 64 bytes followed by the tensors. If some of them are differentiable, the
// receiver answers with a message of their gradients.
//
// Tensors on devices other than the CPU are copied through host memory, unless the two ranks have a
// link (link.h) and all tensors of the message are on the link's device. A copy thread
// (host_copy.h) sends copies from CUDA as soon as they have ended. Everything here works below
// autograd.
//
// Thread safety: different threads may post, wait for and answer messages, but only one thread at a
// time uses the same message.

#include "../group.h"
#include "link.h"
#include "wire.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::ops {

struct PipelineAddress {
  ProcessGroupPtr group;
  int peer;
  std::int64_t channel;
};

// One message and its answer, on one side.
// Errors when waiting: CollectiveMismatchError if the two sides differ. With weft's backend the
// group then has failed and both sides raise; with other backends the sender raises when it waits
// for the gradients. ValueError for a second wait for a received message, or a second backward.
// Errors of the backend.
class PipelineMessage final : public torch::CustomClassHolder {
 public:
  enum class Side { kSender, kReceiver };

  // Posts the message. The sender sends `tensors`; the receiver uses only their shapes, dtypes and
  // devices. `differentiable`: one flag per tensor.
  static c10::intrusive_ptr<PipelineMessage> post(Side side,
                                                  PipelineAddress address,
                                                  const std::vector<at::Tensor>& tensors,
                                                  const std::vector<bool>& differentiable);

  // Waits until all messages and answers that this rank has sent in the group are transmitted; for
  // those over a link on CUDA, makes the current stream wait. Drops the group's receive buffers.
  static void flush(const ProcessGroupPtr& group);

  PipelineMessage(Side side, PipelineAddress address);

  Side side() const { return side_; }
  const PipelineAddress& address() const { return address_; }
  std::size_t num_tensors() const { return layouts_.size(); }
  bool is_differentiable(std::size_t tensor_idx) const;
  bool is_differentiable() const;  // whether any tensor is

  // Receiver: returns the received tensors; call it once. Sender: returns an empty list as soon as
  // the caller may overwrite the sent tensors (over a link on CUDA: on the current stream).
  std::vector<at::Tensor> wait();

  // Receiver: answers with the gradients of the differentiable tensors, in order. Call it once.
  void send_gradients(const std::vector<at::Tensor>& gradients);
  // Sender: receives the answer and returns the gradients. Call it once.
  std::vector<at::Tensor> receive_gradients();

 private:
  using Layouts = std::vector<TensorLayout>;
  using Copies = std::vector<std::function<void()>>;  // each waits for a copy to the host

  Layouts gradient_layouts() const;
  PipelineHeader header_of(const Layouts& layouts, PipelineHeader::Kind kind) const;

  struct Contents {
    std::vector<at::Tensor> tensors;  // contiguous, on the device that they are sent from
    bool is_direct = false;           // over the link, from device to device
    // The copies to the host that may be in flight, and the device of the last one.
    Copies copies;
    std::optional<c10::Device> copied_from;
  };
  Contents prepare_to_send(const std::vector<at::Tensor>& tensors) const;
  void send(const PipelineHeader& header, Contents contents, bool is_answer);
  void send_tensors(std::string_view op, const std::vector<at::Tensor>& tensors, bool is_answer);
  // Lets a copy thread send the tensors. A failure is raised by wait_for_copies().
  void send_after_copies(Contents contents, bool is_answer);
  void start_receiving_header(bool is_answer);
  void start_receiving(const Layouts& layouts, bool is_answer);
  // Waits for the header and compares it. On a mismatch, fails the group or, without weft's
  // backend, notifies the sender; raises.
  void expect_header(const PipelineHeader& expected);
  // Waits for the tensors of the message whose header was received; returns them on the devices of
  // `layouts`. take_direct_tensors(): for a message over the link.
  std::vector<at::Tensor> take_tensors(const Layouts& layouts, bool is_answer);
  std::vector<at::Tensor> take_direct_tensors(const Layouts& layouts);

  // Starts to send or receive `bytes` over the group. exchange() keeps the result in exchanges_.
  PendingCollective start(std::string_view op, bool sends, const at::Tensor& bytes, bool is_answer);
  void exchange(std::string_view op, bool sends, const at::Tensor& bytes, bool is_answer);
  void check_first_answer();
  // Blocks until the copy thread has sent the tensors. Errors: its failure; a time-out.
  void wait_for_copies();
  void wait_for_exchanges();
  // Drops the exchanges that succeeded; returns whether none is in flight.
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
  at::Tensor header_;  // [64] bytes, of the message or, on the sender, of its answer
  PendingCollective pending_header_;
  std::vector<at::Tensor> host_buffers_;        // of tensors that come over the group
  PipelineLink::ReceivedMessage link_message_;  // with a link
  std::mutex mutex_;                            // guards the members below
  std::vector<PendingCollective> exchanges_;
  bool is_copying_ = false;          // until the copy thread has sent the tensors or failed
  std::exception_ptr copy_failure_;  // until it is raised
  std::condition_variable copied_;
};

}  // namespace weft::ops
