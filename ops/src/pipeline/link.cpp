#include "link.h"

#include "wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

namespace weft::ops {

namespace {

using Tensors = std::vector<at::Tensor>;

// Like PipelineHeader, part of the wire format.
struct Announcement {
  PipelineHeader header;
  std::uint32_t is_answer = 0;
  std::uint32_t is_direct = 0;
  std::uint64_t layouts_length = 0;  // int64 values of the layouts that follow; 0: none
};
static_assert(sizeof(Announcement) == 80);

c10::Stream new_stream(const c10::Device& device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device, true);
}

// Returns the layouts as they are sent: an int64 tensor with each tensor's dtype, number of dims
// and sizes.
at::Tensor encoded_layouts(const Tensors& tensors) {
  std::vector<std::int64_t> encoded;
  for (const auto& tensor : tensors) {
    encoded.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
    encoded.push_back(tensor.dim());
    encoded.insert(encoded.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  auto result = at::empty({static_cast<std::int64_t>(encoded.size())}, at::kLong);
  std::memcpy(result.mutable_data_ptr(), encoded.data(), result.nbytes());
  return result;
}

std::string text_of_current_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

// Raises if an earlier message failed.
void raise_if_failed(const PipelineLink::Context& context,
                     const std::optional<std::string>& failure) {
  TORCH_CHECK_WITH(DistBackendError,
                   !failure.has_value(),
                   context.op,
                   ": got ",
                   context.what,
                   " after another message between the two ranks had failed (",
                   failure.value_or(""),
                   "); start the processes again.");
}

}  // namespace

PipelineLink::PipelineLink(int peer, c10::Device device, BackendPtr outgoing, BackendPtr incoming)
    : peer_(peer),
      device_(device),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      receive_stream_(new_stream(device)) {}

void PipelineLink::open(const ProcessGroupPtr& group) {
  const Context context{
      "weft::link_pipeline",
      c10::str("the first message between ranks ", group->getRank(), " and ", peer_)};
  const auto byte = at::zeros({1}, at::TensorOptions(device_).dtype(at::kByte));
  // NCCL connects two ranks when both call it, so both ranks connect the directions in the same
  // order.
  const bool sends_first = group->getRank() < peer_;
  for (const bool sends : {sends_first, !sends_first}) {
    for (auto& work : transfer(context, group, sends, {byte})) {
      work.wait();
    }
  }
}

void PipelineLink::shut_down(const ProcessGroupPtr& group) {
  bool has_failed = false;
  {
    const std::scoped_lock locks(send_mutex_, mutex_);
    has_failed = send_failure_.has_value() || read_failure_.has_value();
  }
  // NCCL's shutdown waits for the peer, so both sides use the same order.
  const bool is_lower_rank = group->getRank() < peer_;
  for (const auto& backend :
       {is_lower_rank ? incoming_ : outgoing_, is_lower_rank ? outgoing_ : incoming_}) {
    has_failed ? backend->abort() : backend->shutdown();
  }
}

PipelineLink::Pending PipelineLink::send(const Context& context,
                                         const ProcessGroupPtr& group,
                                         const PipelineHeader& header,
                                         bool is_answer,
                                         bool is_direct,
                                         const Tensors& tensors) {
  const std::lock_guard lock(send_mutex_);
  raise_if_failed(context, send_failure_);
  try {
    return send_now(context, group, header, is_answer, is_direct, tensors);
  } catch (...) {
    send_failure_ = text_of_current_exception();
    throw;
  }
}

PipelineLink::Pending PipelineLink::send_now(const Context& context,
                                             const ProcessGroupPtr& group,
                                             const PipelineHeader& header,
                                             bool is_answer,
                                             bool is_direct,
                                             const Tensors& tensors) {
  // Submit the tensors first: a message whose submission fails must not be announced.
  auto pending = is_direct ? transfer(context, group, true, tensors) : Pending();
  Announcement announcement;
  announcement.header = header;
  announcement.is_answer = is_answer ? 1 : 0;
  announcement.is_direct = is_direct ? 1 : 0;
  at::Tensor encoded;
  if (is_direct && sent_layouts_.insert(header.layout_hash).second) {
    encoded = encoded_layouts(tensors);
    announcement.layouts_length = static_cast<std::uint64_t>(encoded.numel());
  }
  auto bytes = at::empty({sizeof(announcement)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &announcement, sizeof(announcement));
  const auto number = next_sent_++;
  pending.push_back(
      exchange_bytes(context, group, true, bytes, tag_of(kLinkChannel, number, false)));
  if (encoded.defined()) {
    pending.push_back(exchange_bytes(
        context, group, true, bytes_of(encoded), tag_of(kLinkChannel, number, true)));
  }
  return pending;
}

PipelineLink::ReceivedMessage PipelineLink::take(const Context& context,
                                                 const ProcessGroupPtr& group,
                                                 std::int64_t channel,
                                                 std::uint64_t sequence,
                                                 bool is_answer) {
  const Key key(channel, sequence, is_answer);
  std::unique_lock lock(mutex_);
  while (true) {
    if (auto found = received_.extract(key)) {
      return std::move(found.mapped());
    }
    raise_if_failed(context, read_failure_);
    if (is_reading_) {
      changed_.wait(lock);
      continue;
    }
    is_reading_ = true;
    lock.unlock();
    try {
      auto next = receive_next(context, group);
      lock.lock();
      received_.insert_or_assign(next.first, std::move(next.second));
    } catch (...) {
      const auto text = text_of_current_exception();
      lock.lock();
      read_failure_ = text;
      is_reading_ = false;
      changed_.notify_all();
      throw;
    }
    is_reading_ = false;
    changed_.notify_all();
  }
}

std::pair<PipelineLink::Key, PipelineLink::ReceivedMessage> PipelineLink::receive_next(
    const Context& context, const ProcessGroupPtr& group) {
  Announcement announcement;
  auto bytes = at::empty({sizeof(announcement)}, at::kByte);
  exchange_bytes(context, group, false, bytes, tag_of(kLinkChannel, next_read_, false)).wait();
  std::memcpy(&announcement, bytes.const_data_ptr(), sizeof(announcement));
  const auto& header = announcement.header;
  TORCH_CHECK_WITH(DistBackendError,
                   is_header(header),
                   context.op,
                   ": rank ",
                   peer_,
                   " announced ",
                   context.what,
                   " with bytes that are no header; link the two ranks on both sides.");
  if (announcement.layouts_length > 0) {
    read_layouts(context, group, header.layout_hash, announcement.layouts_length);
  }
  ++next_read_;
  ReceivedMessage message;
  message.header = header;
  message.is_direct = announcement.is_direct != 0;
  if (message.is_direct) {
    message.stream = receive_stream_;
    const c10::StreamGuard stream(receive_stream_);
    for (const auto& layout : layouts_.at(header.layout_hash)) {
      message.tensors.push_back(
          at::empty(layout.sizes, at::TensorOptions(device_).dtype(layout.dtype)));
    }
    message.pending = transfer(context, group, false, message.tensors);
  }
  const Key key(header.channel, header.sequence, announcement.is_answer != 0);
  return {key, std::move(message)};
}

void PipelineLink::read_layouts(const Context& context,
                                const ProcessGroupPtr& group,
                                std::uint64_t layout_hash,
                                std::uint64_t layouts_length) {
  auto encoded = at::empty({static_cast<std::int64_t>(layouts_length)}, at::kLong);
  exchange_bytes(context, group, false, bytes_of(encoded), tag_of(kLinkChannel, next_read_, true))
      .wait();
  const auto* next = encoded.const_data_ptr<std::int64_t>();
  const auto* const end = next + encoded.numel();
  auto& layouts = layouts_[layout_hash];
  layouts.clear();
  while (next != end) {
    Layout each{static_cast<at::ScalarType>(next[0]), {}};
    const auto num_dims = next[1];
    each.sizes.assign(next + 2, next + 2 + num_dims);
    next += 2 + num_dims;
    layouts.push_back(std::move(each));
  }
}

PendingCollective PipelineLink::exchange_bytes(const Context& context,
                                               const ProcessGroupPtr& group,
                                               bool sends,
                                               const at::Tensor& bytes,
                                               int tag) const {
  return {context.op, context.what, group, {bytes}, true, [&](bool /*async_op*/) {
            Tensors tensors{bytes};
            return sends ? group->send(tensors, peer_, tag) : group->recv(tensors, peer_, tag);
          }};
}

PipelineLink::Pending PipelineLink::transfer(const Context& context,
                                             const ProcessGroupPtr& group,
                                             bool sends,
                                             const Tensors& tensors) const {
  const c10::DeviceGuard guard(device_);
  const auto& backend = sends ? outgoing_ : incoming_;
  const int peer_in_backend = group->getRank() < peer_ ? 1 : 0;
  Tensors byte_views;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      byte_views.push_back(bytes_of(tensor));
    }
  }
  const auto start = [&](const at::Tensor& bytes) {
    Tensors one{bytes};
    return sends ? backend->send(one, peer_in_backend, 0) : backend->recv(one, peer_in_backend, 0);
  };
  Pending pending;
  // NCCL uses separate connections for calls outside of a coalesced batch, so a single tensor is
  // coalesced too.
  if (!byte_views.empty() && backend->supportsCoalescing()) {
    pending.emplace_back(context.op, context.what, group, byte_views, true, [&](bool /*async_op*/) {
      CoalescedBatch batch(backend);
      std::ranges::for_each(byte_views, start);
      return batch.end();
    });
    return pending;
  }
  for (const auto& bytes : byte_views) {
    pending.emplace_back(
        context.op, context.what, group, Tensors{bytes}, true, [&](bool /*async_op*/) {
          return start(bytes);
        });
  }
  return pending;
}

}  // namespace weft::ops
