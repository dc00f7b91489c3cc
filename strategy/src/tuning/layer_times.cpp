#include "weft/strategy/tuning/layer_times.h"

#include "weft/strategy/pipeline/sample_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

namespace weft::strategy {

namespace {

constexpr std::array<std::pair<std::string_view, LayerPart>, 3> kParts = {
    {{"embedding", LayerPart::kEmbedding},
     {"block", LayerPart::kBlock},
     {"head", LayerPart::kHead}}};

[[noreturn]] void throw_invalid(const std::string& text) {
  throw std::invalid_argument("tune: " + text);
}

std::string_view name_of(Precision precision) {
  switch (precision) {
    case Precision::k32True:
      return "32-true";
    case Precision::kHalfTrue:
      return "bf16-true or 16-true";
    case Precision::kHalfMixed:
      return "bf16-mixed";
    case Precision::kAutocast:
      return "16-mixed";
  }
  return "";
}

std::string name_of(const LayerSample& sample) {
  return std::string(to_string(sample.part)) + " on " + std::to_string(sample.tensor_size) +
         " tensor-parallel ranks with " + std::to_string(sample.rows) + " rows";
}

void check_model(const LayerTimes& times, const TrainingSpec& spec) {
  const auto* model = std::get_if<DecoderModel>(&spec.model);
  if (model == nullptr) {
    throw_invalid("got layer times of a Llama-like model for one MLP; leave the layer times out");
  }
  const std::string advice =
      "; measure this training (weft profile --config), or leave the layer times out";
  const auto check = [&](std::string_view name, int64_t measured, int64_t wanted) {
    if (measured != wanted) {
      throw_invalid("got layer times of a model with " + std::string(name) + " = " +
                    std::to_string(measured) + " for one with " + std::to_string(wanted) + advice);
    }
  };
  check("dim", times.model.dim, model->dim);
  check("hidden_dim", times.model.hidden_dim, model->hidden_dim);
  check("num_heads", times.model.num_heads, model->num_heads);
  check("num_kv_heads", times.model.num_kv_heads, model->num_kv_heads);
  check("head_dim", times.model.head_dim, model->head_dim);
  check("vocab_size", times.model.vocab_size, model->vocab_size);
  check("attention_bias",
        static_cast<int64_t>(times.model.has_attention_bias),
        static_cast<int64_t>(model->has_attention_bias));
  check("tied", static_cast<int64_t>(times.model.is_tied), static_cast<int64_t>(model->is_tied));
  if (times.precision != spec.precision) {
    throw_invalid("got layer times of precision " + std::string(name_of(times.precision)) +
                  " for a training in " + std::string(name_of(spec.precision)) + advice);
  }
  if (spec.plan) {
    throw_invalid(
        "got layer times, which are those of plan auto, for a plan of rules; use plan: auto, or "
        "leave the layer times out");
  }
}

void check_sample(const LayerSample& sample, int64_t tokens) {
  if (sample.tokens != tokens) {
    throw_invalid("got layer times of sequences of " + std::to_string(sample.tokens) +
                  " tokens for a training with " + std::to_string(tokens) +
                  "; measure with as many (weft profile --config), or leave the layer times out");
  }
  if (sample.tensor_size < 1 || sample.rows < 1 || sample.rows % tokens != 0) {
    throw_invalid("got layer times of " + name_of(sample) +
                  "; give ranks from 1, and a multiple of " + std::to_string(tokens) + " rows");
  }
  if (!std::isfinite(sample.forward) || !std::isfinite(sample.backward) || sample.forward < 0 ||
      sample.backward < 0) {
    throw_invalid("got a negative or infinite time of " + name_of(sample) +
                  "; give seconds from 0");
  }
}

}  // namespace

LayerPart parse_layer_part(std::string_view name) {
  const auto* const found = std::find_if(
      kParts.begin(), kParts.end(), [&](const auto& each) { return each.first == name; });
  if (found == kParts.end()) {
    throw_invalid("got the layer part '" + std::string(name) +
                  "'; use one of 'embedding', 'block', 'head'");
  }
  return found->second;
}

std::string_view to_string(LayerPart part) {
  return kParts.at(static_cast<std::size_t>(part)).first;
}

void check_layer_times(const LayerTimes& times, const TrainingSpec& spec) {
  check_model(times, spec);
  std::set<std::tuple<int64_t, LayerPart, int64_t>> sizes;
  std::map<int64_t, std::set<LayerPart>> parts;
  for (const LayerSample& sample : times.samples) {
    check_sample(sample, spec.tokens);
    if (!sizes.emplace(sample.tensor_size, sample.part, sample.rows).second) {
      throw_invalid("got two layer times of " + name_of(sample) + "; give one");
    }
    parts[sample.tensor_size].insert(sample.part);
  }
  if (times.samples.empty()) {
    throw_invalid("got no layer times; give samples of the embedding, a block and the head");
  }
  for (const auto& [tensor_size, measured] : parts) {
    for (const auto& [name, part] : kParts) {
      if (!measured.contains(part)) {
        throw_invalid(
            "got layer times without the part '" + std::string(name) + "' on " +
            std::to_string(tensor_size) +
            " tensor-parallel ranks; give samples of the embedding, a block and the head");
      }
    }
  }
}

int64_t nearest_tensor_size(const LayerTimes& times, int64_t tensor_size) {
  const auto distance = [&](const LayerSample& sample) {
    const auto [least, most] = std::minmax(sample.tensor_size, tensor_size);
    return std::pair(static_cast<double>(most) / static_cast<double>(least), sample.tensor_size);
  };
  return std::min_element(
             times.samples.begin(),
             times.samples.end(),
             [&](const auto& one, const auto& other) { return distance(one) < distance(other); })
      ->tensor_size;
}

LayerSeconds layer_seconds(const LayerTimes& times,
                           LayerPart part,
                           int64_t tensor_size,
                           int64_t rows) {
  std::map<int64_t, LayerSeconds> by_rows;
  for (const LayerSample& sample : times.samples) {
    if (sample.part == part && sample.tensor_size == tensor_size) {
      by_rows[sample.rows] = {.forward = sample.forward, .backward = sample.backward};
    }
  }
  std::vector<int64_t> sizes;
  std::vector<double> forward;
  std::vector<double> backward;
  for (const auto& [size, seconds] : by_rows) {
    sizes.push_back(size);
    forward.push_back(seconds.forward);
    backward.push_back(seconds.backward);
  }
  const auto num_rows = static_cast<double>(rows);
  return {.forward = MeasuredTime(sizes, forward).at(num_rows),
          .backward = MeasuredTime(sizes, backward).at(num_rows)};
}

}  // namespace weft::strategy
