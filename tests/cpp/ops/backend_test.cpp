// The backend from C++, without Python: a store, a rank and a size. Ranks are threads.
#include <weft/ops/backend.h>
#include <weft/ops/operators.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace weft::testing {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using BackendBody = std::function<void(const BackendPtr& backend, int rank)>;

// Calls `body` on `size` threads, each a rank of one group.
void on_backend(int size, const BackendBody& body, int timeout_ms = 20'000) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  std::atomic<int> num_ended = 0;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto options = c10::make_intrusive<ops::BackendOptions>();
      options->timeout = std::chrono::milliseconds(timeout_ms);
      options->group_name = "from C++";
      try {
        const auto backend = ops::make_backend(store, rank, size, options);
        body(backend, rank);
        ++num_ended;
        while (num_ended < size) std::this_thread::yield();  // no rank leaves before the others
      } catch (const std::exception& error) {
        ++num_ended;
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

at::Tensor sum_over(const BackendPtr& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  backend->allreduce(tensors)->wait();
  return tensor;
}

TEST(BackendFromCpp, ReducesAndGathers) {
  for (const int size : {1, 2, 4}) {
    on_backend(size, [&](const BackendPtr& backend, int rank) {
      EXPECT_EQ(backend->getBackendName(), "weft");
      const at::Tensor sum = sum_over(backend, at::full({1000, 3}, rank + 1.0));
      EXPECT_TRUE(at::equal(sum, at::full({1000, 3}, size * (size + 1) / 2.0)));
      at::Tensor gathered = at::empty({size, 2});
      at::Tensor own = at::full({1, 2}, static_cast<double>(rank));
      backend->_allgather_base(gathered, own)->wait();
      EXPECT_TRUE(at::equal(gathered.select(1, 0), at::arange(size, at::kFloat)));
    });
  }
}

TEST(BackendFromCpp, RunsTheOperators) {
  on_backend(2, [](const BackendPtr& backend, int rank) {
    const auto group =
        c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), rank, 2);
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    const std::string name = "from C++ " + std::to_string(rank);
    c10d::register_process_group(name, group);
    const at::Tensor sum = ops::reduce_from_group(at::full({3}, rank + 1.0), name);
    EXPECT_TRUE(at::equal(sum, at::full({3}, 3.0)));
    // The operator preserves the class of the error.
    try {
      ops::reduce_from_group(at::ones({2 + rank}), name);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const collectives::CollectiveMismatchError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("rank 1 called all_reduce(sum, float32 [3])"), std::string::npos) << text;
      EXPECT_NE(text.find("weft::reduce_from_group"), std::string::npos) << text;
    }
    c10d::unregister_process_group(name);
  });
}

TEST(BackendFromCpp, MakesGroupsThatTheOperatorsFind) {
  c10d::set_thread_isolation_mode(true);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // Several groups over one store. `backend` synchronises the ranks before the groups end.
  on_backend(2, [&](const BackendPtr& backend, int rank) {
    std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
    for (const std::string name : {"first", "second"}) {
      groups.push_back(ops::make_group(name, store, rank, 2));
      EXPECT_EQ(groups.back()->getGroupName(), name);
      const at::Tensor sum = ops::reduce_from_group(at::full({3}, rank + 1.0), name);
      EXPECT_TRUE(at::equal(sum, at::full({3}, 3.0)));
    }
    EXPECT_THROW(ops::make_group("first", store, rank, 2), c10::ValueError);
    EXPECT_THROW(ops::make_group("", store, rank, 2), c10::ValueError);
    backend->barrier()->wait();
    c10d::unregister_all_process_groups();
  });
  c10d::set_thread_isolation_mode(false);
}

TEST(BackendFromCpp, ThrowsTheErrorClassesOfTheCore) {
  on_backend(
      3,
      [](const BackendPtr& backend, int rank) {
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
        }
        EXPECT_THROW(sum_over(backend, at::ones({4})), collectives::CollectiveTimeoutError);
        EXPECT_EQ(backend->getError(), c10d::ErrorType::TIMEOUT);
        EXPECT_THROW(backend->barrier()->wait(), collectives::CollectiveTimeoutError);
      },
      100);
  auto options = c10::make_intrusive<ops::BackendOptions>();
  options->timeout = std::chrono::milliseconds(50);
  EXPECT_THROW(ops::make_backend(c10::make_intrusive<c10d::HashStore>(), 1, 2, options),
               collectives::CollectiveTimeoutError);
  EXPECT_THROW(ops::make_backend(c10::make_intrusive<c10d::HashStore>(), 2, 2, options),
               c10::ValueError);
}

TEST(BackendFromCpp, RejectsSeveralHostsWithoutATransport) {
  // A rank on another host publishes the same configuration and another identity of its host. The
  // line between the two, a random number, is used from rank 0 only.
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto options = c10::make_intrusive<ops::BackendOptions>();
  options->timeout = std::chrono::milliseconds(100);  // without the mismatch, rank 1 is waited for
  std::thread elsewhere([&] {
    const std::vector<uint8_t> published = store->get("host/0");
    std::string other(published.begin(), published.end());
    other = other.substr(0, other.rfind('\n') + 1) + "another host";
    store->set("host/1", std::vector<uint8_t>(other.begin(), other.end()));
  });
  try {
    ops::make_backend(store, 0, 2, options);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const collectives::CollectiveMismatchError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("run on 2 hosts, and these ranks have no transport: 0, 1;"),
              std::string::npos)
        << text;
  }
  elsewhere.join();
}

}  // namespace
}  // namespace weft::testing
