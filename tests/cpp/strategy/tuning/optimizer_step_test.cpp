// The time of steps on the CPU, with optimizer states in CPU memory.

#include "../error_of.h"
#include "models.h"
#include "weft/strategy/tuning/step_time.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace weft::strategy {
namespace {

constexpr double kSteppedMlp = 3 * 8 * 24;
constexpr double kSteppedEmbedding = 64 * 128;
constexpr double kSteppedHead = 64 * 128 + 64;  // with the last norm
constexpr double kSteppedBlock = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64;

TrainingSpec stepped_mlp(std::initializer_list<Axis> axes) {
  return {.model = FeedForwardModel{.dim = 8, .hidden_dim = 24},
          .mesh = Mesh(axes),
          .plan = {},
          .sequences = 5,
          .offloads_states = true,
          .device = DeviceKind::kCuda};
}

// Steps in the backward.
TrainingSpec stepped_decoder(std::initializer_list<Axis> axes) {
  return {.model = tuned_decoder(4),
          .mesh = Mesh(axes),
          .plan = {},
          .sequences = 2,
          .tokens = 16,
          .steps_in_backward = true,
          .offloads_states = true,
          .device = DeviceKind::kCuda};
}

// Copies take 1 s per byte, or CPU memory moves a byte in 1 s; nothing else takes long beside the
// products of a decoder.
Cluster slow_copies() {
  Cluster cluster = only_products();
  cluster.copy_bytes_per_second = 1;
  cluster.host_bytes_per_second = 1e300;
  cluster.host_bytes = 1;
  return cluster;
}

Cluster slow_host() {
  Cluster cluster = slow_copies();
  cluster.copy_bytes_per_second = 1e300;
  cluster.host_bytes_per_second = 1;
  return cluster;
}

double optimizer_seconds(const TrainingSpec& training, const Cluster& cluster) {
  return predict_step_time(training, cluster).optimizer;
}

TEST(OptimizerStep, GradientsAndWeightsAreCopiedToTheHost) {
  TrainingSpec training = stepped_mlp({});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 8 * kSteppedMlp);
  // Each device has a link of its own.
  training.mesh = Mesh({{"tensor_parallel", 2}});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 8 * kSteppedMlp / 2);
  training.precision = Precision::kHalfMixed;
  training.weights = WeightFormat::kSplit;
  training.states = StateFormat::kFloat32;
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 4 * kSteppedMlp / 2);
}

TEST(OptimizerStep, DevicesOfAHostShareItsMemory) {
  // The CPU reads the gradient, and reads and writes the weight and two states; the copies read and
  // write three times.
  constexpr double kBytes = 4 + 2 * (4 + 8) + 12;
  TrainingSpec training = stepped_mlp({});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_host()), kBytes * kSteppedMlp);
  training.optimizer = OptimizerKind::kSgdMomentum;
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_host()), (kBytes - 8) * kSteppedMlp);
  training.optimizer = OptimizerKind::kAdamW;
  training.mesh = Mesh({{"data_replicate", 2}});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_host()), 2 * kBytes * kSteppedMlp);
  Cluster cluster = slow_host();
  cluster.devices_per_host = 1;
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, cluster), kBytes * kSteppedMlp);
}

TEST(OptimizerStep, TheBackwardHidesAllStepsButThoseOfTheLastGradients) {
  // Those of the first block, whose backward is the last one that takes time, and of the embedding.
  constexpr double kLast = kSteppedBlock + kSteppedEmbedding;
  TrainingSpec training = stepped_decoder({});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 8 * kLast);
  training.micro_batches = 3;
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 8 * kLast);
  training.steps_in_backward = false;
  const double elements = 4 * kSteppedBlock + kSteppedEmbedding + kSteppedHead;
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 8 * elements);
  // FSDP2 reduces the gradients of the head with those of the embedding.
  training = stepped_decoder({{"data_parallel", 2}});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()), 8 * (kLast + kSteppedHead) / 2);
}

TEST(OptimizerStep, StepsThatTakeLongerThanTheBackwardAreWaitedFor) {
  TrainingSpec training = stepped_decoder({});
  Cluster cluster = slow_copies();
  cluster.device.float32_flops = 1e300;
  const double elements = 4 * kSteppedBlock + kSteppedEmbedding + kSteppedHead;
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, cluster), 8 * elements);
}

TEST(OptimizerStep, StagesStepInTheirLastBackward) {
  TrainingSpec training = stepped_decoder({{"pipeline_parallel", 2}});
  training.pipeline = {.first_blocks = {2}, .micro_batches = 2};
  // The rank that ends last has the embedding.
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()),
                   8 * (kSteppedBlock + kSteppedEmbedding));
  // FSDP2 reduces the gradients of all layers after the schedule.
  training.mesh = Mesh({{"pipeline_parallel", 2}, {"data_parallel", 2}});
  EXPECT_DOUBLE_EQ(optimizer_seconds(training, slow_copies()),
                   8 * (2 * kSteppedBlock + kSteppedHead) / 2);
}

TEST(OptimizerStep, ClustersWithoutCpuMemoryAreRefused) {
  EXPECT_EQ(error_of([] { return predict_step_time(stepped_mlp({}), only_products()); }),
            "tune: got offloaded optimizer states, and the cluster 'test' has no CPU memory for "
            "them; give copy_bytes_per_second, host_bytes_per_second and host_bytes above 0, or "
            "leave offload out");
}

}  // namespace
}  // namespace weft::strategy
