// The registry of this process's links: see <weft/ops/pipeline.h>.

#include "../per_group.h"
#include "link.h"

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
  using ByPeer = std::map<int, std::shared_ptr<PipelineLink>>;

  static Links& instance() { return process_wide<Links>(); }

  std::shared_ptr<PipelineLink> find(const ProcessGroupPtr& group, int peer) {
    const std::lock_guard lock(mutex_);
    const auto* const links = links_.find(group);
    if (links == nullptr) {
      return nullptr;
    }
    const auto found = links->find(peer);
    return found == links->end() ? nullptr : found->second;
  }

  void add(const ProcessGroupPtr& group, int peer, std::shared_ptr<PipelineLink> link) {
    std::vector<ByPeer> gone;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    links_.find_or_make(group, gone).insert_or_assign(peer, std::move(link));
  }

  ByPeer take(const ProcessGroupPtr& group) {
    const std::lock_guard lock(mutex_);
    return links_.take(group).value_or(ByPeer());
  }

 private:
  std::mutex mutex_;
  PerGroup<ByPeer> links_;
};

}  // namespace

void check_peer(std::string_view op, const ProcessGroupPtr& group, std::int64_t peer) {
  TORCH_CHECK_VALUE(has_cpu_backend(group),
                    op,
                    ": got a group without a backend for CPU tensors, which carries the headers of "
                    "messages; make it with backend=\"cpu:weft,cuda:nccl\".");
  TORCH_CHECK_VALUE(peer >= 0 && peer < group->getSize() && peer != group->getRank(),
                    op,
                    ": got peer ",
                    peer,
                    " on rank ",
                    group->getRank(),
                    " of ",
                    group->getSize(),
                    "; pass another rank of the group.");
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
  const int pair_rank = rank < peer ? 0 : 1;
  std::array<PipelineLink::BackendPtr, 2> towards;
  for (const int to : {0, 1}) {
    auto& backend = towards.at(static_cast<std::size_t>(to)) = make(pair_rank, to);
    TORCH_CHECK_TYPE(backend.defined(), kLink, ": got no backend; make one for each direction.");
    TORCH_CHECK_VALUE(backend->getSize() == 2 && backend->getRank() == pair_rank,
                      kLink,
                      ": got a backend with rank ",
                      backend->getRank(),
                      " of ",
                      backend->getSize(),
                      "; pass one over the two ranks, in which this process is rank ",
                      pair_rank,
                      ".");
  }
  auto& [to_low, to_high] = towards;
  auto link = pair_rank == 0 ? std::make_shared<PipelineLink>(peer, device, to_high, to_low)
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
  for (const auto& [peer, link] : Links::instance().take(group)) {
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
