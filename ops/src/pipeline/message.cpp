#include "message.h"

#include "host_copy.h"
#include "message_checks.h"
#include "raise.h"
#include "receive_buffers.h"
#include "traffic.h"

#include <weft/collectives/error.h>

#include <ATen/ThreadLocalState.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

namespace weft::ops {

namespace {

using Kind = PipelineHeader::Kind;
using Tensors = std::vector<at::Tensor>;
using MessagePtr = c10::intrusive_ptr<PipelineMessage>;

[[noreturn]] void throw_mismatch(const std::string& text) {
  collectives::raise(std::make_exception_ptr(collectives::CollectiveMismatchError(text)));
}

// Whether the group is still registered. A destroyed group transmits nothing more. Ranks may be
// threads with a registry each; then this thread's group of that name has another rank, and
// `group` counts as registered.
bool is_registered(const ProcessGroupPtr& group) {
  try {
    const auto found = c10d::resolve_process_group(group->getGroupName());
    return found == group || found->getRank() != group->getRank();
  } catch (const c10::Error&) {
    return false;
  }
}

// Whether `group` is torch's fake process group, whose other ranks do not exist. Only the name of
// its backend shows that.
bool is_fake_group(const ProcessGroupPtr& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName() == "fake";
}

c10::Stream current_stream_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::chrono::milliseconds timeout_of(const ProcessGroupPtr& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kBackendDefaultTimeout;  // a backend without options
  }
}

}  // namespace

PipelineMessage::PipelineMessage(Side side, PipelineAddress address)
    : side_(side), address_(std::move(address)), link_(link_to(address_.group, address_.peer)) {}

MessagePtr PipelineMessage::post(Side side,
                                 PipelineAddress address,
                                 const Tensors& tensors,
                                 const std::vector<bool>& differentiable) {
  auto& traffic = Traffic::instance();
  traffic.release([&](PipelineMessage& message) {
    return message.is_finished() || !is_registered(message.address_.group);
  });
  auto message = c10::make_intrusive<PipelineMessage>(side, std::move(address));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    message->layouts_.push_back(
        {tensors[i].sizes().vec(), tensors[i].options(), differentiable.at(i)});
  }
  // Prepare before a sequence number is assigned and anything is sent, because preparing may fail.
  Contents contents;
  if (side == Side::kSender) {
    contents = message->prepare_to_send(tensors);
  }
  message->sequence_ = traffic.next_sequence(message->address_, side);
  if (side == Side::kSender) {
    message->op_ = "weft::pipeline_send";
    message->send(message->header_of(message->layouts_, Kind::kData), contents, false);
  } else {
    message->op_ = "weft::pipeline_recv";
    message->start_receiving_header(false);
    // A fake group stands for one of the backend weft.
    const auto& group = message->address_.group;
    if (!message->link_ && (collectives::compares_message_sizes(*group) || is_fake_group(group))) {
      message->start_receiving(message->layouts_, false);
    }
  }
  traffic.add(message);
  return message;
}

void PipelineMessage::flush(const ProcessGroupPtr& group) {
  for (const auto& message : Traffic::instance().unfinished(group)) {
    if (message->side_ == Side::kSender || message->is_received_) {
      message->wait_for_exchanges();
    }
  }
  Traffic::instance().release([](PipelineMessage& message) { return message.is_finished(); });
  ReceiveBuffers::instance().release(group);
}

bool PipelineMessage::is_differentiable(std::size_t tensor_idx) const {
  return layouts_.at(tensor_idx).differentiable;
}

bool PipelineMessage::is_differentiable() const {
  return std::ranges::any_of(layouts_, &TensorLayout::differentiable);
}

Tensors PipelineMessage::wait() {
  op_ = "weft::pipeline_wait";
  if (side_ == Side::kSender) {
    wait_for_exchanges();
    return {};
  }
  TORCH_CHECK_VALUE(!std::exchange(is_received_, true),
                    op_,
                    ": got the token of ",
                    name(),
                    " for the second time; keep the tensors that the first call returned.");
  expect_header(header_of(layouts_, Kind::kData));
  return take_tensors(layouts_, false);
}

void PipelineMessage::send_gradients(const Tensors& gradients) {
  op_ = "the backward of weft::pipeline_wait";
  check_first_answer();
  send(header_of(gradient_layouts(), Kind::kGradients), prepare_to_send(gradients), true);
  Traffic::instance().add(MessagePtr::reclaim_copy(this));
}

Tensors PipelineMessage::receive_gradients() {
  op_ = "the backward of weft::pipeline_send";
  check_first_answer();
  const auto layouts = gradient_layouts();
  wait_for_copies();  // the peer cannot answer before, and never does if the copy failed
  start_receiving_header(true);
  expect_header(header_of(layouts, Kind::kGradients));
  wait_for_exchanges();
  return take_tensors(layouts, true);
}

void PipelineMessage::check_first_answer() {
  TORCH_CHECK_VALUE(
      !std::exchange(is_answered_, true),
      op_,
      ": got a second backward through ",
      name(),
      "; its gradients are sent once: send the message again, or sum the losses first.");
}

PipelineHeader PipelineMessage::header_of(const Layouts& layouts, Kind kind) const {
  return ops::header_of(kind, address_.channel, sequence_, layouts);
}

PipelineMessage::Layouts PipelineMessage::gradient_layouts() const {
  Layouts layouts;
  std::ranges::copy_if(layouts_, std::back_inserter(layouts), &TensorLayout::differentiable);
  return layouts;
}

PipelineMessage::Contents PipelineMessage::prepare_to_send(const Tensors& tensors) const {
  Contents result;
  result.is_direct = link_ && std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
                       return tensor.device() == link_->device();
                     });
  for (const auto& tensor : tensors) {
    const auto plain = tensor.resolve_conj().resolve_neg().contiguous();
    if (result.is_direct) {
      result.tensors.push_back(plain);
      continue;
    }
    auto copy = start_copy_to_host(plain);
    result.tensors.push_back(std::move(copy.tensor));
    if (copy.wait) {
      result.copies.push_back(std::move(copy.wait));
      result.copied_from = plain.device();
    }
  }
  return result;
}

void PipelineMessage::send(const PipelineHeader& header, Contents contents, bool is_answer) {
  if (link_) {
    auto pending = link_->send(
        {op_, name()}, address_.group, header, is_answer, contents.is_direct, contents.tensors);
    const std::lock_guard lock(mutex_);
    std::ranges::move(pending, std::back_inserter(exchanges_));
    if (contents.is_direct) {
      return;
    }
  } else {
    auto bytes = at::empty({sizeof(header)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &header, sizeof(header));
    exchange(op_, true, bytes, is_answer);
  }
  if (contents.copies.empty()) {
    send_tensors(op_, contents.tensors, is_answer);
  } else {
    send_after_copies(std::move(contents), is_answer);
  }
}

void PipelineMessage::send_tensors(std::string_view op, const Tensors& tensors, bool is_answer) {
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      exchange(op, true, bytes_of(tensor), is_answer);
    }
  }
}

void PipelineMessage::send_after_copies(Contents contents, bool is_answer) {
  {
    const std::lock_guard lock(mutex_);
    is_copying_ = true;
  }
  const auto device = contents.copied_from.value();
  const auto op = op_;  // another thread may change op_ meanwhile
  auto wait = [op, name = name(), rank = address_.group->getRank(), copies = contents.copies] {
    try {
      for (const auto& wait_for_copy : copies) {
        wait_for_copy();
      }
    } catch (c10::Error& error) {
      error.add_context(c10::str(op, ": the copy of ", name, " to the host failed on rank ", rank));
      throw;
    }
  };
  auto finish = [op,
                 is_answer,
                 self = MessagePtr::reclaim_copy(this),
                 tensors = std::move(contents.tensors),
                 state = at::ThreadLocalState()](std::exception_ptr failure) {
    const at::ThreadLocalStateGuard guard(state);  // for profilers
    if (!failure) {
      try {
        self->send_tensors(op, tensors, is_answer);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    const std::lock_guard lock(self->mutex_);
    self->is_copying_ = false;
    self->copy_failure_ = std::move(failure);
    self->copied_.notify_all();
  };
  run_on_copy_thread(device, std::move(wait), std::move(finish));
}

void PipelineMessage::wait_for_copies() {
  std::unique_lock lock(mutex_);
  const auto timeout = is_copying_ ? timeout_of(address_.group) : std::chrono::milliseconds(0);
  if (!copied_.wait_for(lock, timeout, [&] { return !is_copying_; })) {
    const auto text = c10::str(op_,
                               ": the copy of ",
                               name(),
                               " to the host did not end on rank ",
                               address_.group->getRank(),
                               " within ",
                               timeout.count(),
                               " ms; look for work on the device that does not end.");
    collectives::raise(std::make_exception_ptr(collectives::CollectiveTimeoutError(text)));
  }
  if (auto failure = std::exchange(copy_failure_, nullptr)) {
    lock.unlock();
    collectives::raise(std::move(failure));
  }
}

void PipelineMessage::start_receiving_header(bool is_answer) {
  if (link_) {
    return;  // the announcement contains it
  }
  header_ = at::zeros({sizeof(PipelineHeader)}, at::kByte);
  pending_header_ = start(op_, false, header_, is_answer);
}

void PipelineMessage::start_receiving(const Layouts& layouts, bool is_answer) {
  host_buffers_.clear();
  for (const auto& layout : layouts) {
    const bool is_pinned = layout.options.device().is_cuda();
    const auto host = layout.options.device(at::kCPU).pinned_memory(is_pinned);
    host_buffers_.push_back(
        ReceiveBuffers::instance().take(address_, is_answer, layout.sizes, host));
    if (host_buffers_.back().numel() > 0) {
      exchange(op_, false, bytes_of(host_buffers_.back()), is_answer);
    }
  }
}

void PipelineMessage::expect_header(const PipelineHeader& expected) {
  PipelineHeader got;
  if (link_) {
    const bool is_answer = expected.kind == Kind::kGradients;
    link_message_ =
        link_->take({op_, name()}, address_.group, address_.channel, sequence_, is_answer);
    got = link_message_.header;
  } else {
    pending_header_.wait();
    std::memcpy(&got, header_.const_data_ptr(), sizeof(got));
    if (is_fake_group(address_.group)) {
      return;  // a fake group receives nothing
    }
  }
  if (got == expected) {
    return;
  }
  const int rank = address_.group->getRank();
  if (is_header(got) && got.kind == Kind::kMismatch) {
    throw_mismatch(c10::str(op_,
                            ": rank ",
                            address_.peer,
                            " expected ",
                            name(),
                            " to be ",
                            describe(got),
                            ", which is not what rank ",
                            rank,
                            " sent; pass matching tensors on both sides."));
  }
  const bool looks_alike = describe(got) == describe(expected);
  const auto text = c10::str(op_,
                             ": rank ",
                             rank,
                             " expected ",
                             name(),
                             " to be ",
                             describe(expected),
                             " but rank ",
                             address_.peer,
                             " sent ",
                             describe(got),
                             looks_alike ? " with different tensors after the first" : "",
                             "; pass matching tensors on both sides.");
  if (!collectives::fail_group(*address_.group, text) && side_ == Side::kReceiver) {
    send(header_of(layouts_, Kind::kMismatch), {}, true);
    Traffic::instance().add(MessagePtr::reclaim_copy(this));
  }
  throw_mismatch(text);
}

Tensors PipelineMessage::take_tensors(const Layouts& layouts, bool is_answer) {
  if (link_message_.is_direct) {
    return take_direct_tensors(layouts);
  }
  if (host_buffers_.empty()) {
    start_receiving(layouts, is_answer);
  }
  wait_for_exchanges();
  auto tensors = std::exchange(host_buffers_, {});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    // The host does not wait for a copy from pinned memory: torch reuses the buffer only after the
    // copy.
    tensors[i] =
        tensors[i].to(layouts[i].options.device(), tensors[i].scalar_type(), /*non_blocking=*/true);
  }
  return tensors;
}

Tensors PipelineMessage::take_direct_tensors(const Layouts& layouts) {
  auto message = std::exchange(link_message_, {});
  for (auto& work : message.pending) {
    work.wait();
  }
  // The tensors were allocated on the receiving stream, not on the current one.
  const auto current_stream = current_stream_of(link_->device());
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    auto& tensor = message.tensors[i];
    if (current_stream != *message.stream) {
      tensor.record_stream(current_stream);
    }
    tensor = tensor.to(layouts[i].options.device());
  }
  return std::move(message.tensors);
}

PendingCollective PipelineMessage::start(std::string_view op,
                                         bool sends,
                                         const at::Tensor& bytes,
                                         bool is_answer) {
  const auto& [group, peer, channel] = address_;
  const int tag = tag_of(channel, sequence_, is_answer);
  return {op, name(), group, Tensors{bytes}, true, [&](bool /*async_op*/) {
            Tensors tensors{bytes};
            return sends ? group->send(tensors, peer, tag) : group->recv(tensors, peer, tag);
          }};
}

void PipelineMessage::exchange(std::string_view op,
                               bool sends,
                               const at::Tensor& bytes,
                               bool is_answer) {
  auto started = start(op, sends, bytes, is_answer);
  const std::lock_guard lock(mutex_);
  exchanges_.push_back(std::move(started));
}

void PipelineMessage::wait_for_exchanges() {
  wait_for_copies();
  std::vector<PendingCollective> exchanges;
  {
    const std::lock_guard lock(mutex_);
    exchanges.swap(exchanges_);
  }
  for (auto& exchange : exchanges) {
    exchange.wait();
  }
}

bool PipelineMessage::is_finished() {
  const std::lock_guard lock(mutex_);
  // Failed exchanges stay, so that wait() raises their error.
  std::erase_if(exchanges_, [](const PendingCollective& exchange) {
    return exchange.is_done() && !exchange.has_failed();
  });
  return !is_copying_ && !copy_failure_ &&
         std::ranges::all_of(exchanges_, &PendingCollective::is_done);
}

std::string PipelineMessage::name() const {
  const int rank = address_.group->getRank();
  const bool sends = side_ == Side::kSender;
  return c10::str("message ",
                  sequence_,
                  " on channel ",
                  address_.channel,
                  " from rank ",
                  sends ? rank : address_.peer,
                  " to rank ",
                  sends ? address_.peer : rank);
}

}  // namespace weft::ops
