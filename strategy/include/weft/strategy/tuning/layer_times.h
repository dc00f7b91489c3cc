#pragma once

// Measured times of the layers of a Llama-like model, which replace predictions from rates.

#include "weft/strategy/memory_model.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace weft::strategy {

// The embedding; one block; the final norm with the output layer and the loss.
enum class LayerPart { kEmbedding, kBlock, kHead };

// Returns the part that is named "embedding", "block" or "head". Throws std::invalid_argument for
// another name.
LayerPart parse_layer_part(std::string_view name);
std::string_view to_string(LayerPart part);

// The seconds that one rank computes for a batch, without communication and recomputation.
struct LayerSample {
  LayerPart part = LayerPart::kBlock;
  int64_t tensor_size = 1;  // ranks over which the plan "auto" shards the part
  int64_t rows = 0;         // tokens of the batch: a multiple of `tokens`
  int64_t tokens = 0;       // of each sequence
  double forward = 0;
  double backward = 0;
};

// Samples of one model. Each tensor-parallel size has samples of all parts.
struct LayerTimes {
  DecoderModel model;                        // num_layers and max_tokens do not matter
  Precision precision = Precision::k32True;  // bfloat16 and float16 count as one
  std::vector<LayerSample> samples;          // in any order
};

// Throws std::invalid_argument unless the times are those of a training: of its model, its
// precision, its tokens of a sequence and the plan "auto"; and for samples that are not valid:
// sizes below 1, negative times, several of one size, a part without samples.
void check_layer_times(const LayerTimes& times, const TrainingSpec& spec);

// Returns the measured tensor-parallel size with the least ratio to `tensor_size`; the smaller one
// of two with the same ratio. REQUIRES: check_layer_times accepts the times.
int64_t nearest_tensor_size(const LayerTimes& times, int64_t tensor_size);

struct LayerSeconds {
  double forward = 0;
  double backward = 0;
};

// Returns the seconds of a part for a batch of `rows` tokens, from the samples of a measured
// tensor-parallel size: linear between them, and outside of them as MeasuredTime
// (pipeline/sample_time.h). REQUIRES: check_layer_times accepts the times.
LayerSeconds layer_seconds(const LayerTimes& times,
                           LayerPart part,
                           int64_t tensor_size,
                           int64_t rows);

}  // namespace weft::strategy
