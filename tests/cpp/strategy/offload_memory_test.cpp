// Memory with optimizer states in CPU memory: what the device no longer holds, and what the host
// does.

#include "error_of.h"
#include "tuning/models.h"
#include "weft/strategy/memory_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace weft::strategy {
namespace {

using enum MemoryCategory;

constexpr int64_t kOffloadWidth = 1024;
constexpr int64_t kOffloadWeight =
    kOffloadWidth * kOffloadWidth * 4;  // bytes of one of the three weights

TrainingSpec offloaded_mlp(int64_t num_ranks, bool offloads) {
  return {.model = FeedForwardModel{.dim = kOffloadWidth, .hidden_dim = kOffloadWidth},
          .mesh = Mesh({{"tensor_parallel", num_ranks}}),
          .plan = {},
          .sequences = 8,
          .offloads_states = offloads,
          .device = DeviceKind::kCuda};
}

TrainingSpec offloaded_decoder(std::initializer_list<Axis> axes, bool offloads) {
  return {.model = tuned_decoder(),
          .mesh = Mesh(axes),
          .plan = {},
          .tokens = 4,
          .offloads_states = offloads,
          .device = DeviceKind::kCuda};
}

MemoryUsage device_bytes(const TrainingSpec& spec, const std::string& name) {
  for (const PhaseMemory& each : predict_memory(spec, 0)) {
    if (each.phase == name) {
      return each.at_peak;
    }
  }
  ADD_FAILURE() << "no phase " << name;
  return {};
}

TEST(OffloadMemory, StatesAreInCpuMemory) {
  for (const int64_t n : {1, 2, 4}) {
    for (const char* const name : {"forward", "backward", "step"}) {
      MemoryUsage expected = device_bytes(offloaded_mlp(n, false), name);
      EXPECT_EQ(expected[kOptimizerState], 6 * kOffloadWeight / n + 3 * 4);
      expected[kOptimizerState] = 0;
      EXPECT_EQ(device_bytes(offloaded_mlp(n, true), name), expected) << name;
    }
    EXPECT_EQ(offloaded_bytes(offloaded_mlp(n, false), 0), 0);
    // The weights' sizes are powers of two, so that the buffers have no more.
    EXPECT_EQ(offloaded_bytes(offloaded_mlp(n, true), 0),
              6 * kOffloadWeight / n + 3 * 4 + 4 * kOffloadWeight / n);
  }
  EXPECT_EQ(parameter_cost(offloaded_mlp(1, true)).bytes_per_element, 4 + 4);
}

TEST(OffloadMemory, BuffersAreRoundedUpToPowersOfTwo) {
  TrainingSpec spec = offloaded_mlp(1, true);
  spec.model = FeedForwardModel{.dim = 8, .hidden_dim = 24, .is_gated = false};
  EXPECT_EQ(offloaded_bytes(spec, 0), 2 * (2 * 8 * 24 * 4 + 4) + 4 * 1024);  // of 768 bytes
  // Four ranks of two have six hidden units; FSDP2 shards their rows.
  spec.mesh = Mesh({{"data_parallel", 2}, {"tensor_parallel", 4}});
  EXPECT_EQ(offloaded_bytes(spec, 0), 2 * (2 * 4 * 6 * 4 + 4) + 4 * 128);  // of 96 bytes
}

TEST(OffloadMemory, LowerBitsOfSplitWeightsAreInCpuMemory) {
  TrainingSpec spec = offloaded_mlp(1, true);
  spec.precision = Precision::kHalfTrue;
  spec.weights = WeightFormat::kSplit;
  spec.states = StateFormat::kInt8;
  EXPECT_EQ(device_bytes(spec, "init")[kOptimizerState], 3 * kOffloadWidth * kOffloadWidth * 2);
  EXPECT_EQ(device_bytes(spec, "forward")[kOptimizerState], 0);
  const int64_t moment = kOffloadWidth * kOffloadWidth + kOffloadWidth * kOffloadWidth / 256 * 4;
  EXPECT_EQ(offloaded_bytes(spec, 0),
            3 * (2 * moment + 4 + kOffloadWidth * kOffloadWidth * 2) +
                4 * kOffloadWidth * kOffloadWidth * 2);
  EXPECT_EQ(parameter_cost(spec).bytes_per_element, 2 + 2);
}

TEST(OffloadMemory, StepsHaveNoTemporariesOnTheDevice) {
  TrainingSpec spec = offloaded_mlp(1, false);
  spec.has_fused_optimizer = false;
  EXPECT_EQ(device_bytes(spec, "step")[kScratch], 3 * kOffloadWeight);
  spec.offloads_states = true;
  EXPECT_EQ(device_bytes(spec, "step")[kScratch], 0);
}

// The gradients of two parameters are copied while that of a third one is computed.
TEST(OffloadMemory, GradientsLiveUntilTheyAreCopied) {
  TrainingSpec spec = offloaded_mlp(1, false);
  spec.steps_in_backward = true;
  EXPECT_EQ(device_bytes(spec, "backward")[kGradients], kOffloadWeight);
  spec.offloads_states = true;
  EXPECT_EQ(device_bytes(spec, "backward")[kGradients], 3 * kOffloadWeight);
  EXPECT_EQ(device_bytes(spec, "step")[kGradients], 0);
}

// FSDP2's gradients of a unit share memory, which is in use until the last two are copied.
TEST(OffloadMemory, GradientsOfAUnitLiveUntilAllAreCopied) {
  const auto backward_bytes = [](bool offloads, bool in_backward) {
    TrainingSpec spec = offloaded_decoder({{"data_parallel", 2}}, offloads);
    spec.steps_in_backward = in_backward;
    const MemoryUsage usage = device_bytes(spec, "backward");
    return usage.total() - usage[kOptimizerState];
  };
  const int64_t block_bytes = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64) * 4;
  EXPECT_EQ(backward_bytes(true, true) - backward_bytes(false, true), block_bytes / 2);
  EXPECT_EQ(backward_bytes(true, false), backward_bytes(false, false));
}

TEST(OffloadMemory, WhatStrategiesRefuseIsRefused) {
  TrainingSpec spec = offloaded_mlp(1, true);
  spec.device = DeviceKind::kCpu;
  const auto error = [&] { return error_of([&] { return predict_memory(spec, 0); }); };
  EXPECT_EQ(error(),
            "memory: got offloaded optimizer states for CPU ranks, whose states are in CPU memory "
            "already; use device cuda, or leave offload out");
  spec.device = DeviceKind::kCuda;
  spec.optimizer = OptimizerKind::kSgd;
  EXPECT_EQ(error(),
            "memory: got offloaded optimizer states and SGD without momentum, which has no states; "
            "use another optimizer, or leave offload out");
  for (const OptimizerKind kind : {OptimizerKind::kSgdMomentum, OptimizerKind::kAdagrad}) {
    spec.optimizer = kind;
    EXPECT_EQ(error(), "accepted");
  }
  spec.zero_stage = 1;
  EXPECT_EQ(error(), "accepted");  // there is nothing to shard
  spec.mesh = Mesh({{"data_parallel", 2}});
  EXPECT_EQ(error(),
            "memory: got offloaded optimizer states and zero_stage = 1, which shards states in "
            "memory; use zero_stage 0, 2 or 3, or leave offload out");
}

}  // namespace
}  // namespace weft::strategy
