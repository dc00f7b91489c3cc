// The registry of this process's links: see <weft/ops/pipeline.h>.

#include "pipeline_link.h"

#include <weft/ops/pipeline.h>

#include <array>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kLink = "weft::link_pipeline";

// The links of all groups of this process. Thread-safe.
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

  void add(const ProcessGroupPtr& group, int peer, std::shared_ptr<PipelineLink> link) {
    take([](const Key& /*key*/, const Entry& entry) { return entry.group.expired(); });
    const std::lock_guard lock(mutex_);
    links_.insert_or_assign({group.get(), peer}, Entry{GroupRef(group), std::move(link)});
  }

  std::vector<std::shared_ptr<PipelineLink>> take(const ProcessGroupPtr& group) {
    return take([&](const Key& key, const Entry&) { return key.first == group.get(); });
  }

 private:
  using GroupRef = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  using Key = std::pair<c10d::ProcessGroup*, int>;
  struct Entry {
    GroupRef group;  // keeps the address, which is part of the key, from being reused
    std::shared_ptr<PipelineLink> link;
  };

  // Removes and returns entries, so that the caller destroys them without the lock.
  template <typename IsTaken>
  std::vector<std::shared_ptr<PipelineLink>> take(const IsTaken& is_taken) {
    std::vector<std::shared_ptr<PipelineLink>> taken;
    const std::lock_guard lock(mutex_);
    for (auto entry = links_.begin(); entry != links_.end();) {
      const auto next = std::next(entry);
      if (is_taken(entry->first, entry->second)) {
        taken.push_back(std::move(entry->second.link));
        links_.erase(entry);
      }
      entry = next;
    }
    return taken;
  }

  std::mutex mutex_;
  std::map<Key, Entry> links_;
};

}  // namespace

void check_peer(std::string_view op, const ProcessGroupPtr& group, std::int64_t peer) {
  TORCH_CHECK_VALUE(has_cpu_backend(group),
                    op,
                    ": got a group without a backend for CPU tensors, which messages are announced "
                    "over; make it with backend=\"cpu:weft,cuda:nccl\".");
  TORCH_CHECK_VALUE(peer >= 0 && peer < group->getSize() && peer != group->getRank(),
                    op,
                    ": got peer ",
                    peer,
                    " on rank ",
                    group->getRank(),
                    " of ",
                    group->getSize(),
                    "; pass another rank of the group, counted in it.");
}

std::shared_ptr<PipelineLink> link_to(const ProcessGroupPtr& group, int peer) {
  return Links::instance().find(group, peer);
}

void link_pipeline(const ProcessGroupPtr& group,
                   int peer,
                   c10::Device device,
                   const MakeLinkBackend& make) {
  check_peer(kLink, group, peer);
  const int rank = group->getRank();
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
    TORCH_CHECK_TYPE(backend.defined(), kLink, ": got no backend; make one for each direction.");
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

std::optional<c10::Device> pipeline_link_device(const ProcessGroupPtr& group, int peer) {
  const auto link = link_to(group, peer);
  return link ? std::optional(link->device()) : std::nullopt;
}

void unlink_pipeline(const ProcessGroupPtr& group) {
  std::exception_ptr failure;
  for (const auto& link : Links::instance().take(group)) {
    try {
      link->shut_down(group);
    } catch (...) {
      failure = failure ? failure : std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace weft::ops
