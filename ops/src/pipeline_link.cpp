#include "pipeline_link.h"

#include "pipeline_wire.h"

#include <weft/ops/pipeline.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

namespace weft::ops {

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::string_view kLink = "weft::link_pipeline";

// In the form that it is sent in.
struct Announcement {
  PipelineHeader header;
  std::uint32_t is_answer = 0;
  std::uint32_t is_direct = 0;
  std::uint64_t num_numbers = 0;  // of the layouts, which follow where they are new
};
static_assert(sizeof(Announcement) == 80);

c10::Stream new_stream(const c10::Device& device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device, true);
}

// For each tensor its dtype, its number of dims, its sizes.
at::Tensor numbers_of(const Tensors& tensors) {
  std::vector<std::int64_t> numbers;
  for (const auto& tensor : tensors) {
    numbers.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
    numbers.push_back(tensor.dim());
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  auto result = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  std::memcpy(result.mutable_data_ptr(), numbers.data(), result.nbytes());
  return result;
}

// Of all groups of this process. Thread safety: all of it.
class Links {
 public:
  static Links& instance() {
    static auto* const links = new Links;  // outlives every group
    return *links;
  }

  std::shared_ptr<PipelineLink> find(const ProcessGroupPtr& group, int peer) {
    const std::lock_guard lock(mutex_);
    const auto found = links_.find({group.get(), peer});
    return found == links_.end() ? nullptr : found->second.link;
  }

  // False where there is one.
  bool add(const ProcessGroupPtr& group, int peer, std::shared_ptr<PipelineLink> link) {
    const std::lock_guard lock(mutex_);
    std::erase_if(links_, [](const auto& entry) { return entry.second.group.expired(); });
    return links_.try_emplace({group.get(), peer}, Entry{GroupRef(group), std::move(link)}).second;
  }

  void release(const ProcessGroupPtr& group) {
    std::vector<Entry> released;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    for (auto entry = links_.begin(); entry != links_.end();) {
      const auto next = std::next(entry);
      if (entry->first.first == group.get()) {
        released.push_back(std::move(entry->second));
        links_.erase(entry);
      }
      entry = next;
    }
  }

 private:
  using GroupRef = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Entry {
    GroupRef group;  // keeps the address from being taken by another group
    std::shared_ptr<PipelineLink> link;
  };

  std::mutex mutex_;
  std::map<std::pair<c10d::ProcessGroup*, int>, Entry> links_;
};

}  // namespace

PipelineLink::PipelineLink(int peer, c10::Device device, BackendPtr outgoing, BackendPtr incoming)
    : peer_(peer),
      device_(device),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      receiving_(new_stream(device)) {}

void PipelineLink::open(const ProcessGroupPtr& group) {
  const Context context{
      kLink, c10::str("the first message between ranks ", group->getRank(), " and ", peer_)};
  const auto byte = at::zeros({1}, at::TensorOptions(device_).dtype(at::kByte));
  // NCCL makes the connection of two ranks when both ask for it: one after the other.
  const bool sends_first = group->getRank() < peer_;
  for (const bool sends : {sends_first, !sends_first}) {
    for (auto& work : carry(context, group, sends, {byte})) {
      work.wait();
    }
  }
}

PipelineLink::Pending PipelineLink::send(const Context& context,
                                         const ProcessGroupPtr& group,
                                         const PipelineHeader& header,
                                         bool is_answer,
                                         bool is_direct,
                                         const Tensors& tensors) {
  Announcement announcement;
  announcement.header = header;
  announcement.is_answer = is_answer ? 1 : 0;
  announcement.is_direct = is_direct ? 1 : 0;
  const std::lock_guard lock(sending_);
  at::Tensor numbers;
  if (is_direct && told_layouts_.insert(header.layout).second) {
    numbers = numbers_of(tensors);
    announcement.num_numbers = static_cast<std::uint64_t>(numbers.numel());
  }
  auto bytes = at::empty({sizeof(announcement)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &announcement, sizeof(announcement));
  const auto number = next_sent_++;
  Pending pending;
  pending.push_back(tell(context, group, true, bytes, tag_of(kLinkChannel, number, false)));
  if (numbers.defined()) {
    pending.push_back(
        tell(context, group, true, bytes_of(numbers), tag_of(kLinkChannel, number, true)));
  }
  if (is_direct) {
    auto carried = carry(context, group, true, tensors);
    std::move(carried.begin(), carried.end(), std::back_inserter(pending));
  }
  return pending;
}

PipelineLink::Arrival PipelineLink::take(const Context& context,
                                         const ProcessGroupPtr& group,
                                         std::int64_t channel,
                                         std::uint64_t sequence,
                                         bool is_answer) {
  const Key key(channel, sequence, is_answer);
  std::unique_lock lock(mutex_);
  while (true) {
    if (auto found = arrived_.extract(key)) {
      return std::move(found.mapped());
    }
    if (is_reading_) {
      changed_.wait(lock);
      continue;
    }
    is_reading_ = true;
    lock.unlock();
    std::optional<std::pair<Key, Arrival>> next;
    std::exception_ptr failure;
    try {
      next = next_arrival(context, group);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    is_reading_ = false;
    changed_.notify_all();
    if (failure) {
      std::rethrow_exception(failure);
    }
    arrived_.insert(std::move(*next));
  }
}

std::pair<PipelineLink::Key, PipelineLink::Arrival> PipelineLink::next_arrival(
    const Context& context, const ProcessGroupPtr& group) {
  Announcement announcement;
  auto bytes = at::empty({sizeof(announcement)}, at::kByte);
  tell(context, group, false, bytes, tag_of(kLinkChannel, next_read_, false)).wait();
  std::memcpy(&announcement, bytes.const_data_ptr(), sizeof(announcement));
  const auto& header = announcement.header;
  if (announcement.num_numbers > 0) {
    read_layouts(context, group, header.layout, announcement.num_numbers);
  }
  ++next_read_;
  Arrival arrival;
  arrival.header = header;
  arrival.is_direct = announcement.is_direct != 0;
  if (arrival.is_direct) {
    arrival.stream = receiving_;
    const c10::StreamGuard stream(receiving_);
    for (const auto& layout : layouts_.at(header.layout)) {
      arrival.tensors.push_back(
          at::empty(layout.sizes, at::TensorOptions(device_).dtype(layout.dtype)));
    }
    arrival.on_their_way = carry(context, group, false, arrival.tensors);
  }
  const Key key(header.channel, header.sequence, announcement.is_answer != 0);
  return {key, std::move(arrival)};
}

void PipelineLink::read_layouts(const Context& context,
                                const ProcessGroupPtr& group,
                                std::uint64_t layout,
                                std::uint64_t num_numbers) {
  auto numbers = at::empty({static_cast<std::int64_t>(num_numbers)}, at::kLong);
  tell(context, group, false, bytes_of(numbers), tag_of(kLinkChannel, next_read_, true)).wait();
  const auto* next = numbers.const_data_ptr<std::int64_t>();
  const auto* const end = next + numbers.numel();
  auto& layouts = layouts_[layout];
  layouts.clear();
  while (next != end) {
    Layout each{static_cast<at::ScalarType>(next[0]), {}};
    const auto num_dims = next[1];
    each.sizes.assign(next + 2, next + 2 + num_dims);
    next += 2 + num_dims;
    layouts.push_back(std::move(each));
  }
}

PendingCollective PipelineLink::tell(const Context& context,
                                     const ProcessGroupPtr& group,
                                     bool sends,
                                     const at::Tensor& bytes,
                                     int tag) const {
  return {context.op, context.what, group, {bytes}, true, [&](bool /*async_op*/) {
            Tensors tensors{bytes};
            return sends ? group->send(tensors, peer_, tag) : group->recv(tensors, peer_, tag);
          }};
}

PipelineLink::Pending PipelineLink::carry(const Context& context,
                                          const ProcessGroupPtr& group,
                                          bool sends,
                                          const Tensors& tensors) const {
  const auto& backend = sends ? outgoing_ : incoming_;
  const int other = group->getRank() < peer_ ? 1 : 0;
  Tensors parts;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      parts.push_back(bytes_of(tensor));
    }
  }
  const auto start = [&](const at::Tensor& part) {
    Tensors one{part};
    return sends ? backend->send(one, other, 0) : backend->recv(one, other, 0);
  };
  Pending pending;
  // NCCL has other connections for what is sent alone: one of a message is sent like several.
  if (!parts.empty() && backend->supportsCoalescing()) {
    pending.emplace_back(context.op, context.what, group, parts, true, [&](bool /*async_op*/) {
      backend->startCoalescing();
      for (const auto& part : parts) {
        start(part);
      }
      return backend->endCoalescing();
    });
    return pending;
  }
  for (const auto& part : parts) {
    pending.emplace_back(
        context.op, context.what, group, Tensors{part}, true, [&](bool /*async_op*/) {
          return start(part);
        });
  }
  return pending;
}

std::shared_ptr<PipelineLink> link_to(const ProcessGroupPtr& group, int peer) {
  return Links::instance().find(group, peer);
}

void link_pipeline(const ProcessGroupPtr& group,
                   int peer,
                   c10::Device device,
                   const MakeLinkBackend& make) {
  const int rank = group->getRank();
  TORCH_CHECK_VALUE(peer >= 0 && peer < group->getSize() && peer != rank,
                    kLink,
                    ": got peer ",
                    peer,
                    " on rank ",
                    rank,
                    " of ",
                    group->getSize(),
                    "; pass another rank of the group, counted in it.");
  TORCH_CHECK_VALUE(has_cpu_backend(group),
                    kLink,
                    ": got a group without a backend for CPU tensors, which messages are announced "
                    "over; make it with backend=\"cpu:weft,cuda:nccl\".");
  TORCH_CHECK_VALUE(link_to(group, peer) == nullptr,
                    kLink,
                    ": got peer ",
                    peer,
                    ", to which rank ",
                    rank,
                    " has a link already; link each pair once.");
  const int own = rank < peer ? 0 : 1;
  std::array<PipelineLink::BackendPtr, 2> towards;
  for (const int to : {0, 1}) {
    auto& backend = towards.at(static_cast<std::size_t>(to)) = make(own, to);
    TORCH_CHECK_VALUE(backend->getSize() == 2 && backend->getRank() == own,
                      kLink,
                      ": got a backend with rank ",
                      backend->getRank(),
                      " of ",
                      backend->getSize(),
                      "; pass one over the two ranks, in which this is rank ",
                      own,
                      ".");
  }
  auto& [to_low, to_high] = towards;
  auto link = own == 0 ? std::make_shared<PipelineLink>(peer, device, to_high, to_low)
                       : std::make_shared<PipelineLink>(peer, device, to_low, to_high);
  link->open(group);
  Links::instance().add(group, peer, std::move(link));
}

void unlink_pipeline(const ProcessGroupPtr& group) { Links::instance().release(group); }

}  // namespace weft::ops
