#include "pipeline_message.h"

#include "raise.h"

#include <weft/collectives/error.h>

#include <ATen/ops/empty.h>

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

  // Takes the messages out that `is_finished`.
  template <typename IsFinished>
  void release(const IsFinished& is_finished) {
    std::list<MessagePtr> candidates;
    {
      const std::lock_guard lock(mutex_);
      candidates.swap(unfinished_);
    }
    // What raises is dropped, so that it raises once.
    while (!candidates.empty()) {
      const auto message = std::move(candidates.front());
      candidates.pop_front();
      bool finished = true;
      try {
        finished = is_finished(*message);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        unfinished_.splice(unfinished_.end(), candidates);
        throw;
      }
      if (!finished) {
        keep(message);
      }
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
    return message.address_.group == address.group && message.is_finished();
  });
  auto message = c10::make_intrusive<PipelineMessage>(side, std::move(address));
  message->sequence_ = traffic.next_sequence(message->address_, side);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    message->layouts_.push_back(
        {tensors[i].sizes().vec(), tensors[i].options(), differentiable.at(i)});
  }
  if (side == Side::kSender) {
    message->op_ = "weft::pipeline_send";
    message->start_receiving_header(true);
    message->send(message->header_of(message->layouts_, Kind::kData), tensors, false);
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
  Traffic::instance().release([&](PipelineMessage& message) {
    if (message.address_.group != group) {
      return false;
    }
    message.wait_for_sends();
    return message.is_finished();
  });
}

bool PipelineMessage::is_differentiable(std::size_t tensor_idx) const {
  return layouts_.at(tensor_idx).differentiable;
}

bool PipelineMessage::is_differentiable() const {
  return std::ranges::any_of(layouts_, &TensorLayout::differentiable);
}

Tensors PipelineMessage::wait() {
  op_ = "weft::pipeline_wait";
  if (side_ == Side::kReceiver) {
    TORCH_CHECK_VALUE(!std::exchange(is_received_, true),
                      op_,
                      ": got the token of ",
                      name(),
                      " for the second time; keep the tensors that the first call gave.");
    expect_header(header_of(layouts_, Kind::kData));
    if (arriving_.empty()) {
      start_receiving(layouts_, false);
    }
    auto tensors = received(layouts_);
    if (!is_differentiable()) {
      send(header_of({}, Kind::kArrived), {}, true);
    }
    return tensors;
  }
  wait_for_sends();
  return {};
}

void PipelineMessage::wait_for_sends() {
  if (has_failed_ || (side_ == Side::kReceiver && !is_received_)) {
    return;
  }
  // The word that it has come tells that it was sent; a refusal, that it may never be.
  if (side_ == Side::kSender && !is_differentiable()) {
    expect_header(header_of({}, Kind::kArrived));
  }
  wait_for_exchanges();
}

void PipelineMessage::send_gradients(const Tensors& gradients) {
  op_ = "the backward of weft::pipeline_wait";
  send(header_of(gradient_layouts(), Kind::kGradients), gradients, true);
  Traffic::instance().keep(MessagePtr::reclaim_copy(this));
}

Tensors PipelineMessage::receive_gradients() {
  op_ = "the backward of weft::pipeline_send";
  const auto layouts = gradient_layouts();
  expect_header(header_of(layouts, Kind::kGradients));
  wait_for_exchanges();
  start_receiving(layouts, true);
  return received(layouts);
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
      exchange(true, tensor.cpu().contiguous(), is_answer);
    }
  }
}

void PipelineMessage::start_receiving_header(bool is_answer) {
  header_ = at::empty({sizeof(PipelineHeader)}, at::kByte);
  exchange(false, header_, is_answer);
  header_on_its_way_ = std::move(exchanges_.back());
  exchanges_.pop_back();
}

void PipelineMessage::start_receiving(const Layouts& layouts, bool is_answer) {
  arriving_.clear();
  for (const auto& layout : layouts) {
    const auto host =
        layout.options.device(at::kCPU).pinned_memory(layout.options.device().is_cuda());
    arriving_.push_back(at::empty(layout.sizes, host));
    if (arriving_.back().numel() > 0) {
      exchange(false, arriving_.back(), is_answer);
    }
  }
}

void PipelineMessage::expect_header(const PipelineHeader& expected) {
  header_on_its_way_.wait();
  const auto got = arrived_header();
  if (got.magic == kMagic && got.kind == expected.kind && got.channel == expected.channel &&
      got.sequence == expected.sequence && got.num_tensors == expected.num_tensors &&
      got.layout == expected.layout) {
    return;
  }
  has_failed_ = true;
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
  if (side_ == Side::kReceiver) {
    try {
      send(header_of(layouts_, Kind::kRefused), {}, true);
    } catch (const std::exception&) {  // the group may have failed already, over the same message
    }
  }
  throw_mismatch(c10::str(op_,
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
                          expected.num_tensors == got.num_tensors
                              ? " with other shapes, dtypes or needs of gradients"
                              : "",
                          "; pass as `like` what the other side sends."));
}

Tensors PipelineMessage::received(const Layouts& layouts) {
  wait_for_exchanges();
  auto tensors = std::exchange(arriving_, {});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = tensors[i].to(layouts[i].options.device());
  }
  return tensors;
}

void PipelineMessage::exchange(bool sends, const at::Tensor& tensor, bool is_answer) {
  const auto& [group, peer, channel] = address_;
  const int tag = tag_of(channel, sequence_, is_answer);
  exchanges_.emplace_back(op_, name(), group, Tensors{tensor}, true, [&](bool /*async_op*/) {
    Tensors tensors{tensor};
    return sends ? group->send(tensors, peer, tag) : group->recv(tensors, peer, tag);
  });
}

void PipelineMessage::wait_for_exchanges() {
  for (auto& exchange : exchanges_) {
    exchange.wait();
  }
  exchanges_.clear();
}

bool PipelineMessage::is_finished() {
  if (has_failed_) {
    return true;
  }
  const bool awaits_word = side_ == Side::kSender && !is_differentiable();
  if (side_ == Side::kSender && header_on_its_way_.is_done() &&
      arrived_header().kind == Kind::kRefused) {
    expect_header(header_of({}, Kind::kArrived));
  }
  return std::ranges::all_of(exchanges_, &PendingCollective::is_done) &&
         (!awaits_word || header_on_its_way_.is_done());
}

PipelineHeader PipelineMessage::arrived_header() const {
  PipelineHeader header;
  std::memcpy(&header, header_.const_data_ptr(), sizeof(header));
  return header;
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
