// Life and death of a group: joining, splitting, leaving.
#include "backend.h"

#include "raise.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <mutex>
#include <utility>

namespace weft::collectives {

namespace {

Store view_of(const c10::intrusive_ptr<c10d::Store>& store) {
  return {[store](const std::string& key, const std::string& value) {
            store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
          },
          [store](const std::string& key, std::chrono::milliseconds timeout) {
            store->wait({key}, timeout);
            const std::vector<uint8_t> value = store->get(key);
            return std::string(value.begin(), value.end());
          },
          [store](const std::string& key) {
            try {
              store->deleteKey(key);
            } catch (const std::exception&) {
              // A store that cannot delete keeps it, which only a group of the same name would
              // mind.
            }
          }};
}

// All groups of this process, for its end.
class LivingEngines {
 public:
  static LivingEngines& instance() {
    // NOTE: never destroyed: a group may outlive the statics.
    static auto* const engines = new LivingEngines;
    return *engines;
  }

  void add(const std::shared_ptr<Engine>& engine) {
    const std::lock_guard lock(mutex_);
    std::erase_if(engines_, [](const auto& each) { return each.expired(); });
    engines_.push_back(engine);
  }

  void leave_all() {
    std::vector<std::weak_ptr<Engine>> engines;
    {
      const std::lock_guard lock(mutex_);
      engines.swap(engines_);
    }
    for (const auto& each : engines) {
      if (const auto engine = each.lock()) engine->leave();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Engine>> engines_;
};

std::shared_ptr<Engine> join_group(const c10::intrusive_ptr<c10d::Store>& store,
                                   int rank,
                                   int size,
                                   const ops::BackendOptions& options) {
  GroupOptions group;
  group.name = options.group_name;
  group.rank = rank;
  group.size = size;
  group.timeout = options.timeout;
  group.staging_limit_bytes = options.staging_limit_bytes;
  for (const uint64_t each : options.global_ranks_in_group) {
    group.global_ranks.push_back(static_cast<int>(each));
  }
  try {
    auto engine = make_engine(view_of(store), group);
    LivingEngines::instance().add(engine);
    return engine;
  } catch (const CollectiveError&) {
    raise(std::current_exception());
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace

WeftBackend::WeftBackend(const c10::intrusive_ptr<c10d::Store>& store,
                         int rank,
                         int size,
                         c10::intrusive_ptr<ops::BackendOptions> options)
    : Backend(rank, size),
      options_(std::move(options)),
      engine_(join_group(store, rank, size, *options_)) {}

// Works may keep the engine; the group is over all the same.
WeftBackend::~WeftBackend() { engine_->leave(); }

void WeftBackend::abort() { engine_->abort(""); }

void WeftBackend::shutdown() { engine_->leave(); }

c10d::ErrorType WeftBackend::getError() {
  const std::exception_ptr failure = engine_->failure();
  if (failure == nullptr) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(failure);
  } catch (const CollectiveTimeoutError&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const PeerLostError&) {
    return c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<c10d::Backend> WeftBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::ranges::find(ranks, getRank());
  if (own == ranks.end()) return nullptr;
  auto options = c10::make_intrusive<ops::BackendOptions>(*options_);
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
  }
  const auto& parents = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto index = static_cast<size_t>(rank);
    options->global_ranks_in_group.push_back(parents.empty() ? index : parents.at(index));
  }
  return ops::make_backend(store,
                           static_cast<int>(own - ranks.begin()),
                           static_cast<int>(ranks.size()),
                           std::move(options));
}

}  // namespace weft::collectives

namespace weft::ops {

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank,
                                               int size,
                                               c10::intrusive_ptr<BackendOptions> options) {
  TORCH_CHECK_VALUE(size > 0 && rank >= 0 && rank < size,
                    "weft: got rank ",
                    rank,
                    " of ",
                    size,
                    "; pass a rank from 0 to one less than the size");
  return c10::make_intrusive<collectives::WeftBackend>(store, rank, size, std::move(options));
}

void leave_all_groups() { collectives::LivingEngines::instance().leave_all(); }

}  // namespace weft::ops
