#include "weft/strategy/tuning/layer_times.h"

#include "../error_of.h"
#include "models.h"
#include "weft/strategy/tuning/search.h"
#include "weft/strategy/tuning/step_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <utility>
#include <variant>

namespace weft::strategy {
namespace {

using testing::HasSubstr;

constexpr int64_t kSampleTokens = 16;
constexpr int64_t kBatchRows = 2 * kSampleTokens;

TrainingSpec measured_training(std::initializer_list<Axis> axes = {}) {
  return {.model = tuned_decoder(3),
          .mesh = Mesh(axes),
          .plan = {},
          .sequences = 2,
          .tokens = kSampleTokens};
}

LayerSample sample_of(
    LayerPart part, int64_t rows, double forward, double backward, int64_t tensor_size = 1) {
  return {.part = part,
          .tensor_size = tensor_size,
          .rows = rows,
          .tokens = kSampleTokens,
          .forward = forward,
          .backward = backward};
}

// Samples of the embedding and the head at one size, and of a block at three.
LayerTimes measured_times() {
  return {.model = tuned_decoder(1),
          .samples = {sample_of(LayerPart::kBlock, 4 * kSampleTokens, 8, 20),
                      sample_of(LayerPart::kBlock, kSampleTokens, 2, 3),
                      sample_of(LayerPart::kBlock, 2 * kSampleTokens, 4, 6),
                      sample_of(LayerPart::kEmbedding, kBatchRows, 0.5, 0.25),
                      sample_of(LayerPart::kHead, kBatchRows, 10, 30)}};
}

// A device whose products take 1 s per operation, with measured times.
Cluster measured_cluster(LayerTimes times = measured_times()) {
  Cluster cluster = only_products();
  cluster.layer_times = std::move(times);
  return cluster;
}

TEST(LayerTimes, AreLinearBetweenRows) {
  const auto block_at = [](int64_t rows) {
    const LayerSeconds seconds = layer_seconds(measured_times(), LayerPart::kBlock, 1, rows);
    return std::pair(seconds.forward, seconds.backward);
  };
  EXPECT_EQ(block_at(16), std::pair(2.0, 3.0));
  EXPECT_EQ(block_at(24), std::pair(3.0, 4.5));
  EXPECT_EQ(block_at(48), std::pair(6.0, 13.0));
  EXPECT_EQ(block_at(64), std::pair(8.0, 20.0));
  // Above the largest sample with the last slope, and below the smallest as the smallest.
  EXPECT_EQ(block_at(96), std::pair(8.0 + 4.0, 20.0 + 14.0));
  EXPECT_EQ(block_at(8), std::pair(2.0, 3.0));
  // One sample: in proportion.
  EXPECT_EQ(layer_seconds(measured_times(), LayerPart::kHead, 1, 16).backward, 15);
}

TEST(LayerTimes, NearestSizeHasTheLeastRatio) {
  LayerTimes times;
  times.samples = {sample_of(LayerPart::kBlock, 16, 1, 1, 8),
                   sample_of(LayerPart::kBlock, 16, 1, 1, 2)};
  for (const auto& [size, nearest] :
       {std::pair<int64_t, int64_t>{1, 2}, {2, 2}, {3, 2}, {4, 2}, {5, 8}, {8, 8}, {64, 8}}) {
    EXPECT_EQ(nearest_tensor_size(times, size), nearest) << size;
  }
}

TEST(LayerTimes, PartsHaveNames) {
  for (const LayerPart part : {LayerPart::kEmbedding, LayerPart::kBlock, LayerPart::kHead}) {
    EXPECT_EQ(parse_layer_part(to_string(part)), part);
  }
  EXPECT_EQ(error_of([] { parse_layer_part("tail"); }),
            "tune: got the layer part 'tail'; use one of 'embedding', 'block', 'head'");
}

TEST(LayerTimes, TimesOfAnotherTrainingRaiseErrors) {
  const auto error = [](const std::function<void(LayerTimes&, TrainingSpec&)>& change) {
    LayerTimes times = measured_times();
    TrainingSpec training = measured_training();
    change(times, training);
    return error_of([&] { check_layer_times(times, training); });
  };
  EXPECT_EQ(error([](auto&, auto&) {}), "accepted");
  EXPECT_EQ(error([](auto& times, auto&) { times.model.hidden_dim = 96; }),
            "tune: got layer times of a model with hidden_dim = 96 for one with 192; measure this "
            "training (weft profile --config), or leave the layer times out");
  const std::pair<const char*, int64_t DecoderModel::*> sizes[] = {
      {"dim", &DecoderModel::dim},
      {"num_heads", &DecoderModel::num_heads},
      {"num_kv_heads", &DecoderModel::num_kv_heads},
      {"head_dim", &DecoderModel::head_dim},
      {"vocab_size", &DecoderModel::vocab_size}};
  for (const auto& [name, size] : sizes) {
    EXPECT_THAT(error([size = size](auto& times, auto&) { ++(times.model.*size); }),
                HasSubstr(std::string("a model with ") + name + " = "));
  }
  EXPECT_THAT(error([](auto& times, auto&) { times.model.has_attention_bias = true; }),
              HasSubstr("attention_bias = 1 for one with 0"));
  EXPECT_THAT(error([](auto& times, auto&) { times.model.is_tied = true; }),
              HasSubstr("tied = 1 for one with 0"));
  EXPECT_THAT(error([](auto&, auto& training) { training.precision = Precision::kHalfMixed; }),
              HasSubstr("got layer times of precision 32-true for a training in bf16-mixed; "));
  EXPECT_THAT(error([](auto&, auto& training) { training.tokens = 32; }),
              HasSubstr("sequences of 16 tokens for a training with 32; "));
  EXPECT_THAT(error([](auto&, auto& training) { training.plan = Plan(); }),
              HasSubstr("for a plan of rules; use plan: auto"));
  EXPECT_THAT(error([](auto&, auto& training) {
                training.model = FeedForwardModel{.dim = 8, .hidden_dim = 8};
              }),
              HasSubstr("for one MLP; leave"));
}

TEST(LayerTimes, InvalidSamplesRaiseErrors) {
  const auto error = [](const std::function<void(std::vector<LayerSample>&)>& change) {
    LayerTimes times = measured_times();
    change(times.samples);
    return error_of([&] { check_layer_times(times, measured_training()); });
  };
  EXPECT_EQ(error([](auto& samples) { samples[0].rows = 24; }),
            "tune: got layer times of block on 1 tensor-parallel ranks with 24 rows; give ranks "
            "from 1, and a multiple of 16 rows");
  EXPECT_THAT(error([](auto& samples) { samples[0].tensor_size = 0; }), HasSubstr("on 0 tensor"));
  EXPECT_THAT(error([](auto& samples) { samples[0].rows = 0; }), HasSubstr("with 0 rows"));
  EXPECT_THAT(error([](auto& samples) { samples[0].backward = -1; }),
              HasSubstr("got a negative or infinite time of block on 1"));
  EXPECT_THAT(error([](auto& samples) { samples[0].forward = 1.0 / 0.0; }),
              HasSubstr("got a negative or infinite time of block on 1"));
  EXPECT_THAT(error([](auto& samples) { samples.push_back(samples[1]); }),
              HasSubstr("got two layer times of block on 1 tensor-parallel ranks with 16 rows"));
  EXPECT_THAT(error([](auto& samples) { samples.back().tensor_size = 2; }),
              HasSubstr("got layer times without the part 'head' on 1 tensor-parallel ranks"));
  EXPECT_THAT(error([](auto& samples) { samples.clear(); }), HasSubstr("got no layer times"));
}

TEST(MeasuredSteps, ComputeIsThatOfTheSamples) {
  const StepTime time = predict_step_time(measured_training(), measured_cluster());
  EXPECT_DOUBLE_EQ(time.compute, 3 * (4 + 6) + (0.5 + 0.25) + (10 + 30));
  EXPECT_DOUBLE_EQ(time.total(), time.compute);
  // The operations of the model do not depend on the times.
  EXPECT_DOUBLE_EQ(time.model_flops,
                   predict_step_time(measured_training(), only_products()).model_flops);
  TrainingSpec accumulating = measured_training();
  accumulating.sequences = 1;
  accumulating.micro_batches = 2;
  EXPECT_DOUBLE_EQ(predict_step_time(accumulating, measured_cluster()).compute,
                   2 * (3 * (2 + 3) + (0.25 + 0.125) + (5 + 15)));
}

TEST(MeasuredSteps, FullCheckpointsRecomputeTheMeasuredForward) {
  TrainingSpec training = measured_training();
  training.checkpointing = Checkpointing::kFull;
  EXPECT_DOUBLE_EQ(predict_step_time(training, measured_cluster()).recomputation, 3 * 4);
  training.checkpointed_blocks = 1;
  EXPECT_DOUBLE_EQ(predict_step_time(training, measured_cluster()).recomputation, 4);
}

TEST(MeasuredSteps, SelectiveCheckpointsRecomputeTheShareOfTheRoofline) {
  Cluster cluster = measured_cluster();
  cluster.device = {.float32_flops = 1e300, .half_flops = 1e300, .bytes_per_second = 1};
  TrainingSpec training = measured_training();
  training.checkpointing = Checkpointing::kSelective;
  // Elements that a block's forward reads and writes: query and output projections, key and value,
  // gate and up, down; attention; and what is recomputed: norms, rotary positions, the gate and
  // the residual additions.
  constexpr double kProducts = 2 * (kBatchRows * 128 + 64 * 64) + 2 * (kBatchRows * 96 + 64 * 32) +
                               3 * (kBatchRows * 256 + 64 * 192);
  constexpr double kAttention = kBatchRows * 2 * 96;
  constexpr double kRecomputed = kBatchRows * (2 * 8 * 64 + 8 * 96 + 5 * 192 + 2 * 3 * 64);
  constexpr double kShare = kRecomputed / (kProducts + kAttention + kRecomputed);
  EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).recomputation, 3 * 4 * kShare);
}

TEST(MeasuredSteps, OtherTensorSizesScaleWithTheRoofline) {
  // Two ranks have half of the operations of blocks and of the output layer. The embedding has no
  // roofline.
  const StepTime two =
      predict_step_time(measured_training({{"tensor_parallel", 2}}), measured_cluster());
  EXPECT_DOUBLE_EQ(two.compute, (3 * (4 + 6) + (10 + 30)) / 2.0 + (0.5 + 0.25));
  TrainingSpec training = measured_training({{"tensor_parallel", 4}});
  training.checkpointing = Checkpointing::kFull;
  EXPECT_DOUBLE_EQ(predict_step_time(training, measured_cluster()).recomputation, 3 * 4 / 4.0);
  // Measured, two ranks have their own times; four ranks have half of these.
  LayerTimes times = measured_times();
  for (const LayerPart part : {LayerPart::kEmbedding, LayerPart::kBlock, LayerPart::kHead}) {
    times.samples.push_back(sample_of(part, kBatchRows, 3, 5, 2));
  }
  EXPECT_DOUBLE_EQ(
      predict_step_time(measured_training({{"tensor_parallel", 2}}), measured_cluster(times))
          .compute,
      5 * (3 + 5));
  EXPECT_DOUBLE_EQ(
      predict_step_time(measured_training({{"tensor_parallel", 4}}), measured_cluster(times))
          .compute,
      4 * (3 + 5) / 2.0 + (3 + 5));
  EXPECT_DOUBLE_EQ(predict_step_time(measured_training(), measured_cluster(times)).compute,
                   3 * (4 + 6) + (0.5 + 0.25) + (10 + 30));
}

TEST(MeasuredSteps, ProcessesShareCores) {
  Cluster cluster = measured_cluster();
  cluster.cores_per_host = 2;
  Cluster alone = cluster;
  alone.cores_per_host = 0;
  TrainingSpec training = measured_training();
  // Four ranks on two cores take twice as long, and eight four times, whether their tensor-parallel
  // size was measured or not.
  const std::pair<const char*, double> meshes[] = {
      {"data_parallel=4", 2}, {"tensor_parallel=4", 2}, {"data_parallel=4,tensor_parallel=2", 4}};
  for (const auto& [mesh, factor] : meshes) {
    training.mesh = Mesh::parse(mesh);
    EXPECT_DOUBLE_EQ(predict_step_time(training, cluster).compute,
                     factor * predict_step_time(training, alone).compute)
        << mesh;
  }
}

TEST(MeasuredSteps, CommunicationIsThatOfTheLinks) {
  Cluster cluster = measured_cluster();
  cluster.within_host.seconds_per_message = 1;
  Cluster rates = cluster;
  rates.layer_times.reset();
  const TrainingSpec training = measured_training({{"data_parallel", 2}, {"tensor_parallel", 2}});
  const StepTime measured = predict_step_time(training, cluster);
  const StepTime predicted = predict_step_time(training, rates);
  EXPECT_EQ(measured.tensor_parallel, predicted.tensor_parallel);
  EXPECT_EQ(measured.data_parallel, predicted.data_parallel);
  EXPECT_EQ(measured.sent_bytes, predicted.sent_bytes);
  EXPECT_NE(measured.compute, predicted.compute);
}

TEST(MeasuredSteps, StagesAreAsEvenAsTheSamples) {
  TrainingSpec training = measured_training();
  std::get<DecoderModel>(training.model).num_layers = 8;
  // A block takes 10 s, and the head 40 s.
  EXPECT_EQ(even_stages(training, measured_cluster(), 2), std::vector<int64_t>{6});
}

TEST(MeasuredSteps, SearchesFindTheFastestMeasuredLayout) {
  LayoutSearch search = {.training = measured_training(),
                         .cluster = measured_cluster(),
                         .num_devices = 2,
                         .global_sequences = 4,
                         .memory_limit = int64_t{1} << 40,
                         .max_results = 1};
  // On two tensor-parallel ranks, all parts take far less than the roofline says.
  for (const LayerPart part : {LayerPart::kEmbedding, LayerPart::kBlock, LayerPart::kHead}) {
    search.cluster.layer_times->samples.push_back(sample_of(part, kBatchRows, 1e-3, 1e-3, 2));
  }
  const LayoutSearchResult found = search_layouts(search);
  ASSERT_EQ(found.layouts.size(), 1U);
  EXPECT_EQ(found.layouts.front().training.mesh.to_string(), "tensor_parallel=2");
  search.cluster.layer_times->model.dim = 32;
  EXPECT_THAT(error_of([&] { search_layouts(search); }),
              HasSubstr("a model with dim = 32 for one with 64"));
}

}  // namespace
}  // namespace weft::strategy
