#include "pipeline_message.h"

#include "fail_group.h"
#include "raise.h"

#include <weft/collectives/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

using Kind = PipelineHeader::Kind;
using Tensors = std::vector<at::Tensor>;
using MessagePtr = c10::intrusive_ptr<PipelineMessage>;

constexpr std::uint32_t kMagic = 0x77656674;
// Users' own messages have smaller tags than 2^29; the largest here is below what the backend
// takes.
constexpr int kFirstTag = 1 << 29;
constexpr int kSequenceBits = 18;
constexpr int kChannelBits = 10;

int tag_of(std::int64_t channel, std::uint64_t sequence, bool is_answer) {
  const auto number = static_cast<int>(sequence & ((1U << kSequenceBits) - 1));
  return kFirstTag + (static_cast<int>(is_answer) << (kSequenceBits + kChannelBits)) +
         (static_cast<int>(channel) << kSequenceBits) + number;
}

// How many messages there were, and those that are still on their way.
class Traffic {
 public:
  static Traffic& instance() {
    static auto* const traffic = new Traffic();  // outlives every group
    return *traffic;
  }

  std::uint64_t next_sequence(const PipelineAddress& address, PipelineMessage::Side side) {
    const std::lock_guard lock(mutex_);
    std::erase_if(counters_, [](const auto& entry) { return entry.second.group.expired(); });
    const auto key = std::tuple(address.group.get(), address.peer, address.channel, side);
    auto found = counters_.find(key);
    if (found == counters_.end()) {
      found = counters_.emplace(key, Counter{GroupRef(address.group), 0}).first;
    }
    return found->second.next++;
  }

  // Those of `group` that have something to be sent or received.
  std::vector<MessagePtr> unfinished(const ProcessGroupPtr& group) {
    const std::lock_guard lock(mutex_);
    std::vector<MessagePtr> messages;
    std::ranges::copy_if(unfinished_, std::back_inserter(messages), [&](const auto& message) {
      return message->address().group == group;
    });
    return messages;
  }

  // Lets go those that `is_over`.
  template <typename IsOver>
  void release(const IsOver& is_over) {
    std::list<MessagePtr> released;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    for (auto message = unfinished_.begin(); message != unfinished_.end();) {
      const auto next = std::next(message);
      if (is_over(**message)) {
        released.splice(released.end(), unfinished_, message);
      }
      message = next;
    }
  }

  void keep(const MessagePtr& message) {
    const std::lock_guard lock(mutex_);
    unfinished_.push_back(message);
  }

 private:
  using GroupRef = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Counter {
    GroupRef group;  // keeps the address from being taken by another group
    std::uint64_t next;
  };

  std::mutex mutex_;
  std::map<std::tuple<c10d::ProcessGroup*, int, std::int64_t, PipelineMessage::Side>, Counter>
      counters_;
  std::list<MessagePtr> unfinished_;
};

class LayoutHash {
 public:
  // FNV-1a
  void add(std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ ((value >> (8 * byte)) & 0xFFU)) * 0x100000001B3U;
    }
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325U;
};

// "2 tensors, the first Float [2, 3]"
std::string describe(const PipelineHeader& header) {
  std::ostringstream text;
  text << header.num_tensors << (header.num_tensors == 1 ? " tensor" : " tensors");
  if (header.num_tensors > 0) {
    text << (header.num_tensors == 1 ? ", " : ", the first ")
         << static_cast<at::ScalarType>(header.first_dtype) << " [";
    for (std::size_t dim = 0; dim < header.first_dim; ++dim) {
      text << (dim > 0 ? ", " : "");
      if (dim == header.first_sizes.size()) {
        text << "...";
        break;
      }
      text << header.first_sizes.at(dim);
    }
    text << ']';
  }
  return text.str();
}

[[noreturn]] void throw_mismatch(const std::string& text) {
  collectives::raise(std::make_exception_ptr(collectives::CollectiveMismatchError(text)));
}

// Whether the operators still find the group; one that was destroyed carries nothing any more.
bool is_registered(const ProcessGroupPtr& group) {
  try {
    return c10d::resolve_process_group(group->getGroupName()) == group;
  } catch (const c10::Error&) {
    return false;
  }
}

// What is sent of a tensor: contiguous, in host memory.
at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().cpu().contiguous();
}

// Its bytes: every backend takes those, whatever the dtype.
// A contiguous tensor of one element may have any stride.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
}

// Whether a receive may be posted before it is known that the sender's message has its size: the
// backend of weft refuses what does not fit on both sides, others may not.
bool refuses_wrong_sizes(const ProcessGroupPtr& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName() == "weft";
}

}  // namespace

PipelineMessage::PipelineMessage(Side side, PipelineAddress address)
    : side_(side), address_(std::move(address)) {}

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
  // What may fail comes before the number is taken and anything is sent.
  Tensors given;
  if (side == Side::kSender) {
    std::ranges::transform(tensors, std::back_inserter(given), on_host);
  }
  message->sequence_ = traffic.next_sequence(message->address_, side);
  if (side == Side::kSender) {
    message->op_ = "weft::pipeline_send";
    message->send(message->header_of(message->layouts_, Kind::kData), given, false);
  } else {
    message->op_ = "weft::pipeline_recv";
    message->start_receiving_header(false);
    if (refuses_wrong_sizes(message->address_.group)) {
      message->start_receiving(message->layouts_, false);
    }
  }
  traffic.keep(message);
  return message;
}

void PipelineMessage::flush(const ProcessGroupPtr& group) {
  for (const auto& message : Traffic::instance().unfinished(group)) {
    if (message->side_ == Side::kSender || message->is_received_) {
      message->wait_for_exchanges();
    }
  }
  Traffic::instance().release([](PipelineMessage& message) { return message.is_finished(); });
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
                    " for the second time; keep the tensors that the first call gave.");
  expect_header(header_of(layouts_, Kind::kData));
  if (arriving_.empty()) {
    start_receiving(layouts_, false);
  }
  return received(layouts_);
}

void PipelineMessage::send_gradients(const Tensors& gradients) {
  op_ = "the backward of weft::pipeline_wait";
  check_first_answer();
  Tensors given;
  std::ranges::transform(gradients, std::back_inserter(given), on_host);
  send(header_of(gradient_layouts(), Kind::kGradients), given, true);
  Traffic::instance().keep(MessagePtr::reclaim_copy(this));
}

Tensors PipelineMessage::receive_gradients() {
  op_ = "the backward of weft::pipeline_send";
  check_first_answer();
  const auto layouts = gradient_layouts();
  start_receiving_header(true);
  expect_header(header_of(layouts, Kind::kGradients));
  wait_for_exchanges();
  start_receiving(layouts, true);
  return received(layouts);
}

void PipelineMessage::check_first_answer() {
  TORCH_CHECK_VALUE(!std::exchange(is_answered_, true),
                    op_,
                    ": got a second backward through ",
                    name(),
                    "; its gradients travel once: send it again, or add up the losses first.");
}

PipelineMessage::Layouts PipelineMessage::gradient_layouts() const {
  Layouts layouts;
  std::ranges::copy_if(layouts_, std::back_inserter(layouts), &TensorLayout::differentiable);
  return layouts;
}

PipelineHeader PipelineMessage::header_of(const Layouts& layouts, Kind kind) const {
  PipelineHeader header;
  header.magic = kMagic;
  header.kind = kind;
  header.channel = static_cast<std::uint32_t>(address_.channel);
  header.num_tensors = static_cast<std::uint32_t>(layouts.size());
  header.sequence = sequence_;
  LayoutHash hash;
  for (const auto& layout : layouts) {
    hash.add(static_cast<std::uint64_t>(layout.options.dtype().toScalarType()));
    hash.add(static_cast<std::uint64_t>(layout.differentiable));
    hash.add(layout.sizes.size());
    for (const auto size : layout.sizes) {
      hash.add(static_cast<std::uint64_t>(size));
    }
  }
  header.layout = hash.value();
  if (!layouts.empty()) {
    const auto& first = layouts.front();
    header.first_dtype = static_cast<std::uint8_t>(first.options.dtype().toScalarType());
    header.first_dim = static_cast<std::uint8_t>(first.sizes.size());
    const auto num_sizes = std::min(first.sizes.size(), header.first_sizes.size());
    for (std::size_t dim = 0; dim < num_sizes; ++dim) {
      header.first_sizes.at(dim) = static_cast<std::uint32_t>(first.sizes[dim]);
    }
  }
  return header;
}

void PipelineMessage::send(const PipelineHeader& header, const Tensors& tensors, bool is_answer) {
  auto bytes = at::empty({sizeof(header)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &header, sizeof(header));
  exchange(true, bytes, is_answer);
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      exchange(true, bytes_of(tensor), is_answer);
    }
  }
}

void PipelineMessage::start_receiving_header(bool is_answer) {
  header_ = at::zeros({sizeof(PipelineHeader)}, at::kByte);
  header_on_its_way_ = start(false, header_, is_answer);
}

void PipelineMessage::start_receiving(const Layouts& layouts, bool is_answer) {
  arriving_.clear();
  for (const auto& layout : layouts) {
    const bool is_pinned = layout.options.device().is_cuda();
    const auto host = layout.options.device(at::kCPU).pinned_memory(is_pinned);
    arriving_.push_back(at::empty(layout.sizes, host));
    if (arriving_.back().numel() > 0) {
      exchange(false, bytes_of(arriving_.back()), is_answer);
    }
  }
}

void PipelineMessage::expect_header(const PipelineHeader& expected) {
  header_on_its_way_.wait();
  PipelineHeader got;
  std::memcpy(&got, header_.const_data_ptr(), sizeof(got));
  if (got.magic == kMagic && got.kind == expected.kind && got.channel == expected.channel &&
      got.sequence == expected.sequence && got.num_tensors == expected.num_tensors &&
      got.layout == expected.layout) {
    return;
  }
  const int rank = address_.group->getRank();
  if (got.magic == kMagic && got.kind == Kind::kRefused) {
    throw_mismatch(c10::str(op_,
                            ": rank ",
                            address_.peer,
                            " expected ",
                            name(),
                            " to be ",
                            describe(got),
                            ", which is not what rank ",
                            rank,
                            " sent; bring both sides in line."));
  }
  const bool is_of_number = expected.num_tensors == got.num_tensors;
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
                             is_of_number ? " with other shapes, dtypes or needs of gradients" : "",
                             "; bring both sides in line.");
  if (!collectives::fail_group(*address_.group, text) && side_ == Side::kReceiver) {
    send(header_of(layouts_, Kind::kRefused), {}, true);
    Traffic::instance().keep(MessagePtr::reclaim_copy(this));
  }
  throw_mismatch(text);
}

Tensors PipelineMessage::received(const Layouts& layouts) {
  wait_for_exchanges();
  auto tensors = std::exchange(arriving_, {});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = tensors[i].to(layouts[i].options.device());
  }
  return tensors;
}

PendingCollective PipelineMessage::start(bool sends, const at::Tensor& bytes, bool is_answer) {
  const auto& [group, peer, channel] = address_;
  const int tag = tag_of(channel, sequence_, is_answer);
  return {op_, name(), group, Tensors{bytes}, true, [&](bool /*async_op*/) {
            Tensors tensors{bytes};
            return sends ? group->send(tensors, peer, tag) : group->recv(tensors, peer, tag);
          }};
}

void PipelineMessage::exchange(bool sends, const at::Tensor& bytes, bool is_answer) {
  auto started = start(sends, bytes, is_answer);
  const std::lock_guard lock(mutex_);
  exchanges_.push_back(std::move(started));
}

void PipelineMessage::wait_for_exchanges() {
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
  // What has failed stays for wait() to say so.
  std::erase_if(exchanges_, [](const PendingCollective& exchange) {
    return exchange.is_done() && !exchange.has_failed();
  });
  return std::ranges::all_of(exchanges_, &PendingCollective::is_done);
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
