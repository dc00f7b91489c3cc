// Plants a fault in a kernel and checks that the emulator, or a sanitizer, finds it.
#include "cuda_emulator.h"

#include "cuda_emulator_faults.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace weft::cuda_emulator::testing {
namespace {

constexpr int kThreads = 256;

std::vector<float> counted() {
  std::vector<float> numbers(kThreads);
  std::iota(numbers.begin(), numbers.end(), 1.0F);
  return numbers;
}

// Returns whether `is_right` holds in every order of the threads.
bool holds_in_all_orders(const std::function<bool()>& is_right) {
  const Settings before = settings();
  bool holds = true;
  for (const auto order : {Order::kForward, Order::kReverse, Order::kRandom}) {
    settings().order = order;
    settings().seed = 1;
    holds = is_right() && holds;
  }
  settings() = before;
  return holds;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(CudaEmulator, FindsMissingBarrierAfterWriting) {
  const auto is_right = [](bool has_fault) {
    float sum = 0;
    sum_without_barrier(counted().data(), &sum, has_fault);
    return sum == kThreads * (kThreads + 1) / 2;
  };
  EXPECT_TRUE(holds_in_all_orders([&] { return is_right(false); }));
  EXPECT_FALSE(holds_in_all_orders([&] { return is_right(true); }));
}

TEST(CudaEmulator, FindsMissingBarrierBeforeOverwriting) {
  const auto is_right = [](bool has_fault) {
    const auto numbers = counted();
    std::vector<float> rotated(2 * kThreads);
    overwrite_without_barrier(numbers.data(), rotated.data(), has_fault);
    std::vector<float> expected;
    for (int turn = 0; turn < 2; ++turn) {
      for (int i = 0; i < kThreads; ++i) {
        expected.push_back(numbers[static_cast<std::size_t>((i + 37) % kThreads)] +
                           static_cast<float>(turn));
      }
    }
    return rotated == expected;
  };
  EXPECT_TRUE(holds_in_all_orders([&] { return is_right(false); }));
  EXPECT_FALSE(holds_in_all_orders([&] { return is_right(true); }));
}

TEST(CudaEmulator, FindsBarrierThatSomeThreadsDoNotReach) {
  EXPECT_EQ(error_of([] { return_before_barrier(false); }), "none");
  EXPECT_EQ(error_of([] { return_before_barrier(true); }),
            "block 0 x 0 x 0: 128 of 256 threads reached a barrier, and the others ended before "
            "it");
}

TEST(CudaEmulator, FindsShuffleThatALaneDoesNotReach) {
  EXPECT_EQ(error_of([] { shuffle_without_lane(false); }), "none");
  EXPECT_EQ(error_of([] { shuffle_without_lane(true); }),
            "block 0 x 0 x 0, warp 0: 31 of 32 lanes reached a shuffle that all must reach");
}

TEST(CudaEmulator, FindsShuffleWithAPartialMask) {
  EXPECT_EQ(error_of([] { shuffle_with_partial_mask(false); }), "none");
  const std::string error = error_of([] { shuffle_with_partial_mask(true); });  // of any thread
  EXPECT_TRUE(error.ends_with(" of block 0 x 0 x 0 shuffles with a mask that lacks lanes"))
      << error;
  EXPECT_EQ(error_of([] { shuffle_with_partial_mask(false); }), "none")
      << "after the error in another block";
}

TEST(CudaEmulator, PoisonsSharedMemory) {
  auto numbers = counted();
  read_unset_shared(numbers.data(), /*has_fault=*/false);
  EXPECT_EQ(numbers, counted());
  read_unset_shared(numbers.data(), /*has_fault=*/true);
  for (const float number : numbers) EXPECT_TRUE(std::isnan(number));
}

TEST(CudaEmulatorDeathTest, SanitizersFindAccessesOutOfBounds) {
  constexpr int kSize = 600;
  const auto numbers = std::make_unique<float[]>(kSize);
  step_out_of_bounds(numbers.get(), kSize, /*has_fault=*/false);
  EXPECT_DEATH(step_out_of_bounds(numbers.get(), kSize, /*has_fault=*/true),
               "heap-buffer-overflow");
  float number = 0;
  step_out_of_shared(&number, /*has_fault=*/false);
  EXPECT_EQ(number, 1);
  EXPECT_DEATH(step_out_of_shared(&number, /*has_fault=*/true), "heap-buffer-overflow");
}

TEST(CudaEmulatorDeathTest, SanitizersFindMisalignedPacks) {
  const std::vector<float> numbers(132, 1);
  std::vector<float> copies(128);
  load_misaligned(numbers.data(), copies.data(), /*has_fault=*/false);
  EXPECT_DEATH(load_misaligned(numbers.data(), copies.data(), /*has_fault=*/true),
               "misaligned address");
}

TEST(CudaEmulator, ChecksTheSizesOfLaunches) {
  EXPECT_EQ(error_of([] { launch_too_many_threads(false); }), "none");
  EXPECT_EQ(error_of([] { launch_too_many_threads(true); }),
            "a launch has blocks of 1025 x 1 x 1 threads; a block has 1 to 1024");
  EXPECT_EQ(error_of([] { launch_with_too_much_shared(false); }), "none");
  EXPECT_EQ(error_of([] { launch_with_too_much_shared(true); }),
            "a launch has 49153 bytes of dynamic shared memory; the kernel may use 49152");
  const Device& device = settings().device;
  EXPECT_EQ(error_of([] { allow_too_much_shared(false); }), "none");
  EXPECT_EQ(error_of([] { allow_too_much_shared(true); }),
            "a kernel is allowed " + std::to_string(device.shared_bytes_per_block + 1) +
                " bytes of dynamic shared memory, but " + device.name + " has only " +
                std::to_string(device.shared_bytes_per_block));
}

}  // namespace
}  // namespace weft::cuda_emulator::testing
