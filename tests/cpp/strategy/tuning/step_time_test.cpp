#include "weft/strategy/tuning/step_time.h"

#include "../error_of.h"
#include "models.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <variant>
#include <vector>

namespace weft::strategy {
namespace {

constexpr double kTokens = 2 * 16;

TrainingSpec decoder_training(std::initializer_list<Axis> axes, int64_t num_layers = 3) {
  return {.model = tuned_decoder(num_layers),
          .mesh = Mesh(axes),
          .plan = {},
          .sequences = 2,
          .tokens = 16};
}

// Operations of the forward of a block's products and of its attention, and of the output layer.
constexpr double kBlockProducts = 2 * kTokens * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192);
constexpr double kAttention = 2 * kTokens * 16 * 64;
constexpr double kHead = 2 * kTokens * 64 * 128;
// Elements of a block, and of the embedding, the last norm and the output layer.
constexpr double kBlockElements = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64;
constexpr double kRootElements = 2 * 64 * 128 + 64;

TEST(StepTime, ProductsTakeTheirOperations) {
  const TrainingSpec mlp = {.model = FeedForwardModel{.dim = 8, .hidden_dim = 24},
                            .mesh = Mesh(),
                            .plan = {},
                            .sequences = 5};
  const StepTime time = predict_step_time(mlp, only_products());
  EXPECT_DOUBLE_EQ(time.compute, 3 * 2 * 5 * 3 * 8 * 24);
  EXPECT_DOUBLE_EQ(time.total(), time.compute);
  EXPECT_DOUBLE_EQ(time.model_flops, time.compute);

  const StepTime decoder = predict_step_time(decoder_training({}), only_products());
  EXPECT_DOUBLE_EQ(decoder.compute, 9 * kBlockProducts + 3 * 3.5 * kAttention + 3 * kHead);
  EXPECT_DOUBLE_EQ(decoder.model_flops, 3 * (3 * (kBlockProducts + kAttention) + kHead));
}

TEST(StepTime, HalfPrecisionHasRatesOfItsOwn) {
  TrainingSpec training = decoder_training({});
  training.precision = Precision::kHalfTrue;
  EXPECT_DOUBLE_EQ(predict_step_time(training, only_products()).compute,
                   predict_step_time(decoder_training({}), only_products()).compute / 2);
}

TEST(StepTime, TensorParallelRanksShareProducts) {
  const StepTime one = predict_step_time(decoder_training({}), only_products());
  const StepTime two =
      predict_step_time(decoder_training({{"tensor_parallel", 2}}), only_products());
  EXPECT_DOUBLE_EQ(two.compute, one.compute / 2);
  EXPECT_DOUBLE_EQ(two.model_flops, one.model_flops / 2);
}

TEST(StepTime, SmallProductsTakeTheirBytes) {
  Cluster cluster = only_products();
  cluster.device = {.float32_flops = 1e300, .half_flops = 1e300, .bytes_per_second = 1};
  const TrainingSpec mlp = {.model = FeedForwardModel{.dim = 8, .hidden_dim = 24},
                            .mesh = Mesh(),
                            .plan = {},
                            .sequences = 5};
  // Three products, and five passes over the hidden features.
  const double forward = 3 * 4 * (5 * (8 + 24) + 8 * 24) + 5 * 4 * 5 * 24;
  const StepTime time = predict_step_time(mlp, cluster);
  EXPECT_DOUBLE_EQ(time.compute, 3 * forward);
  EXPECT_DOUBLE_EQ(time.optimizer, 3 * 8 * 24 * 28);
}

TEST(StepTime, TensorParallelRanksSumFourTimesPerBlock) {
  Cluster cluster = only_products();
  cluster.within_host.seconds_per_message = 1;
  // An all-reduce over two ranks has two messages. Four for each block; one for the embedding; one,
  // and an all-gather of the logits, for the output layer.
  const StepTime time = predict_step_time(decoder_training({{"tensor_parallel", 2}}), cluster);
  EXPECT_DOUBLE_EQ(time.tensor_parallel, 3 * 4 * 2 + 2 + 2 + 1);
  const double activation_bytes = kTokens * 64 * 4;
  EXPECT_DOUBLE_EQ(time.sent_bytes, (3 * 4 + 2) * activation_bytes + kTokens * 128 * 4 / 2);
}

TEST(StepTime, FullCheckpointsRunBlocksAgain) {
  Cluster cluster = only_products();
  cluster.within_host.seconds_per_message = 1;
  TrainingSpec training = decoder_training({{"tensor_parallel", 2}});
  const StepTime without = predict_step_time(training, cluster);
  training.checkpointing = Checkpointing::kFull;
  const StepTime full = predict_step_time(training, cluster);
  EXPECT_DOUBLE_EQ(full.compute, without.compute);
  EXPECT_DOUBLE_EQ(full.recomputation, 3 * (kBlockProducts + kAttention) / 2 + 3 * 2 * 2);
  training.checkpointing = Checkpointing::kSelective;
  EXPECT_LT(predict_step_time(training, cluster).recomputation, 1e-3);
}

TEST(StepTime, SequenceParallelRanksGatherAndReduceScatter) {
  Cluster cluster = only_products();
  cluster.within_host.seconds_per_message = 1;
  TrainingSpec training = decoder_training({{"tensor_parallel", 2}});
  training.sequence_parallel = true;
  // A gather or a reduce-scatter over two ranks has one message. A block has four in the forward
  // and five in the backward, which gathers the input of the MLP again, and sums the gradients of
  // two norms. The output of the last block is gathered, and so is the gradient of the first one's
  // input. One sum for the embedding; one, and a gather of the logits, for the output layer.
  const double of_block = 4 + 5 + 2 * 2;
  StepTime time = predict_step_time(training, cluster);
  EXPECT_DOUBLE_EQ(time.tensor_parallel, 3 * of_block + 2 + 2 + 2 + 1);
  const double activation_bytes = kTokens * 64 * 4;
  EXPECT_DOUBLE_EQ(time.sent_bytes,
                   (3 * 9 + 2) * activation_bytes / 2 + 3 * 2 * 64 * 4 + 2 * activation_bytes +
                       kTokens * 128 * 4 / 2);
  training.checkpointing = Checkpointing::kFull;
  time = predict_step_time(training, cluster);
  EXPECT_DOUBLE_EQ(time.recomputation, 3 * (kBlockProducts + kAttention) / 2 + 3 * 4);
  training.checkpointing = Checkpointing::kNone;
  // Each stage has a gather more in the forward and in the backward.
  training.model = tuned_decoder(4);
  const double alone = predict_step_time(training, cluster).tensor_parallel;
  training.mesh = Mesh({{"pipeline_parallel", 2}, {"tensor_parallel", 2}});
  training.pipeline = {.first_blocks = {2}, .micro_batches = 1};
  // The rank of the last stage, which has the output layer.
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).tensor_parallel, alone - 2 * of_block - 2);
}

TEST(StepTime, SequenceParallelRanksShareNormsAndSums) {
  Cluster cluster = only_products();
  cluster.device = {.float32_flops = 1e300, .half_flops = 1e300, .bytes_per_second = 1};
  TrainingSpec training = decoder_training({{"tensor_parallel", 2}});
  training.sequences = 1;
  const double full = predict_step_time(training, cluster).compute;
  training.sequence_parallel = true;
  // Half of 8 passes for each of two norms, and of 3 for each of two sums, three times.
  const double num_elements = 16 * 64;
  EXPECT_DOUBLE_EQ(full - predict_step_time(training, cluster).compute,
                   3 * 3 * (2 * 8 + 2 * 3) * num_elements / 2 * 4);
  // Two sequences: twice as much, less the copies of 9 collectives of a block and 2 of the model,
  // each of which reads and writes an element.
  training.sequence_parallel = false;
  training.sequences = 2;
  const double of_two = predict_step_time(training, cluster).compute;
  training.sequence_parallel = true;
  EXPECT_DOUBLE_EQ(
      of_two - predict_step_time(training, cluster).compute,
      3 * 3 * (2 * 8 + 2 * 3) * num_elements * 4 - (3 * 9 + 2) * 2 * 2 * num_elements * 4);
}

TEST(StepTime, DataParallelRanksGatherAndReduceUnits) {
  Cluster cluster = only_products();
  cluster.within_host.bytes_per_second = 1;
  // Forward and backward gather the blocks, except that the last stays gathered; the root once.
  const double gathered = 5 * kBlockElements + kRootElements;
  const double reduced = 3 * kBlockElements + kRootElements;
  const StepTime time = predict_step_time(decoder_training({{"data_parallel", 4}}), cluster);
  EXPECT_NEAR(time.data_parallel, 3 * (gathered + reduced), 1e-3);
  EXPECT_NEAR(time.sent_bytes, 3 * (gathered + reduced), 1e-3);

  TrainingSpec half = decoder_training({{"data_parallel", 4}});
  half.precision = Precision::kHalfTrue;
  EXPECT_NEAR(predict_step_time(half, cluster).data_parallel, 3 * (gathered / 2 + reduced), 1e-3);
}

TEST(StepTime, ReplicasAverageShards) {
  Cluster cluster = only_products();
  cluster.within_host.bytes_per_second = 1;
  const double elements = 3 * kBlockElements + kRootElements;
  const StepTime alone = predict_step_time(decoder_training({{"data_replicate", 2}}), cluster);
  EXPECT_NEAR(alone.data_parallel, 4 * elements, 1e-3);
  const StepTime sharded =
      predict_step_time(decoder_training({{"data_replicate", 2}, {"data_parallel", 2}}), cluster);
  const double gathers = 2 * (5 * kBlockElements + kRootElements);
  EXPECT_NEAR(sharded.data_parallel, gathers + 2 * elements + 2 * elements, 1e-3);
}

TEST(StepTime, OverlapHidesCommunicationBesideCompute) {
  Cluster cluster = only_products();
  cluster.device.overlaps = true;
  cluster.within_host.seconds_per_message = 1;
  // Products take longer than messages, so that the device waits only for the first two gathers
  // and the last two reductions.
  EXPECT_DOUBLE_EQ(
      predict_step_time(decoder_training({{"data_parallel", 2}}), cluster).data_parallel, 4);
  cluster.device.float32_flops = 1e300;
  EXPECT_DOUBLE_EQ(
      predict_step_time(decoder_training({{"data_parallel", 2}}), cluster).data_parallel, 6 + 4);
}

TEST(StepTime, MicroBatchesRepeatAllButReductionsAndTheOptimizer) {
  Cluster cluster = only_products();
  cluster.device.bytes_per_second = 1e3;
  cluster.within_host.seconds_per_message = 1;
  TrainingSpec training = decoder_training({{"data_parallel", 2}, {"tensor_parallel", 2}});
  const StepTime one = predict_step_time(training, cluster);
  training.micro_batches = 3;
  const StepTime three = predict_step_time(training, cluster);
  // A reduce-scatter over two ranks has one message; there is one for each block and the root.
  constexpr double kReductions = 4;
  const auto gathers = [](const StepTime& time) { return time.data_parallel - kReductions; };
  EXPECT_DOUBLE_EQ(three.compute, 3 * one.compute);
  EXPECT_DOUBLE_EQ(three.tensor_parallel, 3 * one.tensor_parallel);
  EXPECT_DOUBLE_EQ(gathers(three), 3 * gathers(one));
  EXPECT_DOUBLE_EQ(gathers(one), 5 + 1);
  EXPECT_DOUBLE_EQ(three.optimizer, one.optimizer);
}

TEST(StepTime, MicroBatchesReduceGradientsOnce) {
  TrainingSpec training = decoder_training({{"data_parallel", 2}});
  const double one = predict_step_time(training, only_products()).sent_bytes;
  training.micro_batches = 3;
  const double three = predict_step_time(training, only_products()).sent_bytes;
  // A rank sends half of what is gathered or reduced.
  EXPECT_NEAR(three - one, 2 * (5 * kBlockElements + kRootElements) * 4 / 2, 1e-3);
}

TEST(StepTime, ProcessesShareCores) {
  Cluster cluster = only_products();
  cluster.device.bytes_per_second = 1e3;
  cluster.cores_per_host = 2;
  cluster.devices_per_host = 6;
  EXPECT_DOUBLE_EQ(slowdown(cluster, 1), 1);
  EXPECT_DOUBLE_EQ(slowdown(cluster, 4), 2);
  EXPECT_DOUBLE_EQ(slowdown(cluster, 600), 3);
  const TrainingSpec training = decoder_training({{"data_parallel", 4}});
  const StepTime shared = predict_step_time(training, cluster);
  cluster.cores_per_host = 0;
  const StepTime alone = predict_step_time(training, cluster);
  EXPECT_DOUBLE_EQ(shared.compute, 2 * alone.compute);
  EXPECT_DOUBLE_EQ(shared.optimizer, 2 * alone.optimizer);
  EXPECT_DOUBLE_EQ(shared.data_parallel, alone.data_parallel);
}

TEST(StepTime, InvalidSpecsAreRefused) {
  EXPECT_EQ(
      error_of([] {
        return predict_step_time(decoder_training({{"pipeline_parallel", 2}}), only_products());
      }),
      "memory: got the mesh 'pipeline_parallel=2' without stages; give both the axis "
      "pipeline_parallel and the first blocks of stages, or none");
}

TEST(StepTime, ZeroStagesGatherAndReduceOtherBytes) {
  Cluster cluster = only_products();
  cluster.within_host.bytes_per_second = 1;
  const double elements = 3 * kBlockElements + kRootElements;
  TrainingSpec training = decoder_training({{"data_parallel", 4}});
  // Three quarters of each float32 element are sent: for a gather and a reduction of all units.
  training.zero_stage = 2;
  StepTime time = predict_step_time(training, cluster);
  EXPECT_NEAR(time.data_parallel, 3 * 2 * elements, 1e-3);
  EXPECT_NEAR(time.sent_bytes, 3 * 2 * elements, 1e-3);
  // For an all-reduce, which takes two, and a gather of the parameters.
  training.zero_stage = 1;
  time = predict_step_time(training, cluster);
  EXPECT_NEAR(time.data_parallel, 3 * 3 * elements, 1e-3);
  EXPECT_NEAR(time.sent_bytes, 3 * 3 * elements, 1e-3);
  training.zero_stage = 0;
  EXPECT_NEAR(predict_step_time(training, cluster).data_parallel, 3 * 2 * elements, 1e-3);
}

TEST(StepTime, FewerElementsAreSteppedWithShardedStates) {
  Cluster cluster = only_products();
  cluster.device.bytes_per_second = 1e3;
  TrainingSpec training = decoder_training({{"data_parallel", 4}});
  const double sharded = predict_step_time(training, cluster).optimizer;
  training.zero_stage = 1;
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).optimizer, sharded);
  training.zero_stage = 0;
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).optimizer, 4 * sharded);
}

TEST(StepTime, StagesWaitForThePipelineToFill) {
  TrainingSpec training = decoder_training({{"pipeline_parallel", 2}}, 4);
  training.sequences = 8;
  training.pipeline = {.first_blocks = {2}, .micro_batches = 4};
  // Stage 1, which has the output layer, computes without a pause after the first forward of stage
  // 0, whose last backward follows.
  const StepTime time = predict_step_time(training, only_products());
  const double block = 3 * kBlockProducts + 3.5 * kAttention;
  EXPECT_DOUBLE_EQ(time.compute, 4 * (2 * block + 3 * kHead));
  EXPECT_DOUBLE_EQ(time.pipeline, 2 * block);
  EXPECT_DOUBLE_EQ(time.model_flops, 4 * 3 * (4 * (kBlockProducts + kAttention) + kHead) / 2);
  EXPECT_EQ(least_step_time(training, only_products()).total(), time.compute);
  // A quarter of the micro-batches: as long in all, because each is four times as large.
  training.pipeline->micro_batches = 1;
  EXPECT_DOUBLE_EQ(predict_step_time(training, only_products()).pipeline, 4 * 2 * block);
}

TEST(StepTime, StagesSendTheirOutputsAndGradients) {
  TrainingSpec training = decoder_training({{"pipeline_parallel", 2}}, 4);
  training.pipeline = {.first_blocks = {2}, .micro_batches = 2};
  Cluster cluster = only_products();
  cluster.within_host.seconds_per_message = 1000;
  const double at_once = predict_step_time(training, only_products()).total();
  // The output of the first micro-batch, and the gradient of the last one, are waited for.
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).total(), at_once + 2 * 1000);
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).sent_bytes, kTokens * 64 * 4);
}

TEST(StepTime, StagesOnDifferentHostsUseTheLinkOfADevice) {
  TrainingSpec training = decoder_training({{"pipeline_parallel", 2}, {"data_parallel", 2}}, 4);
  training.zero_stage = 0;
  training.pipeline = {.first_blocks = {2}, .micro_batches = 1};
  Cluster cluster = only_products();
  cluster.across_hosts.bytes_per_second = 1;
  const double on_one_host = predict_step_time(training, cluster).pipeline;
  cluster.devices_per_host = 2;
  const double num_bytes = kTokens * 64 * 4;  // of the output, and of its gradient
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).pipeline, on_one_host + 2 * num_bytes);
  // FSDP2 gathers bfloat16, and the stages send it.
  training.precision = Precision::kHalfMixed;
  const double full_sent = predict_step_time(training, only_products()).sent_bytes;
  training.zero_stage = 3;
  training.mesh = Mesh({{"pipeline_parallel", 2}});
  const double float_message = predict_step_time(training, only_products()).sent_bytes;
  EXPECT_DOUBLE_EQ(float_message, num_bytes);
  EXPECT_GT(full_sent, float_message);
}

TEST(StepTime, StagesGatherAndReduceEachLayer) {
  TrainingSpec training = decoder_training({{"pipeline_parallel", 2}, {"data_parallel", 2}}, 4);
  training.pipeline = {.first_blocks = {1}, .micro_batches = 2};
  Cluster cluster = only_products();
  cluster.within_host.seconds_per_message = 1;
  // The last stage has three blocks, and the final norm with the output layer.
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).data_parallel, 4 * (1 + 1));
}

TEST(StepTime, TiedWeightsExchangeGradients) {
  TrainingSpec training = decoder_training({{"pipeline_parallel", 2}}, 4);
  training.pipeline = {.first_blocks = {2}, .micro_batches = 2};
  const double untied = predict_step_time(training, only_products()).sent_bytes;
  std::get<DecoderModel>(training.model).is_tied = true;
  EXPECT_DOUBLE_EQ(predict_step_time(training, only_products()).sent_bytes, untied + 64 * 128 * 4);
}

TEST(StepTime, EvenStagesCountTheOutputLayer) {
  const TrainingSpec training = decoder_training({}, 8);
  EXPECT_EQ(even_stages(training, only_products(), 1), std::vector<int64_t>{});
  EXPECT_EQ(even_stages(training, only_products(), 4), (std::vector<int64_t>{2, 4, 6}));
  TrainingSpec large = training;
  std::get<DecoderModel>(large.model).vocab_size = 128 * 40;
  const std::vector<int64_t> first_blocks = even_stages(large, only_products(), 2);
  ASSERT_EQ(first_blocks.size(), 1U);
  EXPECT_GT(first_blocks.front(), 4);
}

}  // namespace
}  // namespace weft::strategy
