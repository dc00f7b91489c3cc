#include "weft/strategy/pipeline/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace weft::strategy {

namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();
constexpr double kMaxBytes = 4e18;  // below 2^62

void check_arguments(std::span<const LayerCost> layers, const PartitionOptions& options) {
  const auto throw_invalid = [](const std::string& text) {
    throw std::invalid_argument("partition: " + text);
  };
  if (options.num_stages < 1) {
    throw_invalid("num_stages is " + std::to_string(options.num_stages) + "; pass 1 or more");
  }
  if (layers.size() < static_cast<size_t>(options.num_stages)) {
    throw_invalid("got " + std::to_string(options.num_stages) + " stages for " +
                  std::to_string(layers.size()) + " layers; pass at most as many stages as layers");
  }
  if (!options.in_flight.empty() &&
      options.in_flight.size() != static_cast<size_t>(options.num_stages)) {
    throw_invalid("in_flight has " + std::to_string(options.in_flight.size()) + " numbers for " +
                  std::to_string(options.num_stages) + " stages; pass one for each stage");
  }
  if (std::any_of(
          options.in_flight.begin(), options.in_flight.end(), [](int64_t n) { return n < 0; })) {
    throw_invalid("a number of micro-batches in flight is negative; pass 0 or more");
  }
  if (!(options.memory_weight >= 0 && options.memory_weight <= 1)) {
    throw_invalid("memory_weight is " + std::to_string(options.memory_weight) +
                  "; pass a number from 0 (time) to 1 (memory)");
  }
  if (options.memory_limit && *options.memory_limit < 0) {
    throw_invalid("memory_limit is " + std::to_string(*options.memory_limit) +
                  "; pass bytes from 0 on");
  }
  double time = 0;
  double bytes = 0;
  for (const LayerCost& layer : layers) {
    time += layer.time;
    bytes += static_cast<double>(layer.parameter_bytes);
    for (const int64_t in_flight : options.in_flight) {
      bytes += static_cast<double>(in_flight) * static_cast<double>(layer.activation_bytes);
    }
    bytes += static_cast<double>(layer.activation_bytes);
  }
  if (std::isinf(time) || bytes > kMaxBytes) {
    throw_invalid(
        "the layers' times or bytes add up to more than can be counted; pass smaller ones");
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!std::isfinite(layers[i].time) || layers[i].time < 0 || layers[i].activation_bytes < 0 ||
        layers[i].parameter_bytes < 0) {
      throw_invalid("layer " + std::to_string(i) +
                    " has a cost that is negative or no number; pass costs from 0 on");
    }
  }
}

// Sums over ranges of layers, each the difference of two prefix sums.
class Sums {
 public:
  Sums(std::span<const LayerCost> layers, const PartitionOptions& options) : options_(options) {
    times_.push_back(0);
    activations_.push_back(0);
    parameters_.push_back(0);
    for (const LayerCost& layer : layers) {
      times_.push_back(times_.back() + layer.time);
      activations_.push_back(activations_.back() + layer.activation_bytes);
      parameters_.push_back(parameters_.back() + layer.parameter_bytes);
    }
  }

  [[nodiscard]] size_t num_layers() const { return times_.size() - 1; }

  [[nodiscard]] double time(size_t begin, size_t end) const { return times_[end] - times_[begin]; }

  [[nodiscard]] int64_t bytes(size_t stage, size_t begin, size_t end) const {
    const int64_t in_flight = options_.in_flight.empty() ? 1 : options_.in_flight[stage];
    return parameters_[end] - parameters_[begin] +
           in_flight * (activations_[end] - activations_[begin]);
  }

  // Returns the cost to minimize; kImpossible above the memory limit.
  [[nodiscard]] double cost(size_t stage, size_t begin, size_t end, double memory_weight) const {
    const int64_t stage_bytes = bytes(stage, begin, end);
    if (options_.memory_limit && stage_bytes > *options_.memory_limit) {
      return kImpossible;
    }
    const auto fraction = [](double value, double all) { return all > 0 ? value / all : 0; };
    const auto all_bytes = static_cast<double>(parameters_.back() + activations_.back());
    return (1 - memory_weight) * fraction(time(begin, end), times_.back()) +
           memory_weight * fraction(static_cast<double>(stage_bytes), all_bytes);
  }

 private:
  const PartitionOptions& options_;
  // Entry i is the sum over the first i layers.
  std::vector<double> times_;
  std::vector<int64_t> activations_;
  std::vector<int64_t> parameters_;
};

struct Cut {
  double value = kImpossible;
  std::vector<size_t> begins;  // of each stage
};

// Returns the cut into `num_stages` with the least value, by dynamic programming over stages.
// cost(stage, begin, end) is the cost of a stage with the layers [begin, end); add(value, cost)
// combines the value of the previous stages with this cost.
template <typename Cost, typename Add>
Cut best_cut(size_t num_layers, size_t num_stages, Cost cost, Add add) {
  // Indexed by the end of the last stage so far: the best value, and where that stage begins.
  std::vector<double> values(num_layers + 1, kImpossible);
  values[0] = 0;
  std::vector<std::vector<size_t>> begins(num_stages, std::vector<size_t>(num_layers + 1));
  for (size_t stage = 0; stage < num_stages; ++stage) {
    std::vector<double> next(num_layers + 1, kImpossible);
    for (size_t end = stage + 1; end <= num_layers - (num_stages - 1 - stage); ++end) {
      for (size_t begin = stage; begin < end; ++begin) {
        const double value = add(values[begin], cost(stage, begin, end));
        if (value < next[end]) {
          next[end] = value;
          begins[stage][end] = begin;
        }
      }
    }
    values = std::move(next);
  }
  Cut cut{.value = values[num_layers], .begins = {}};
  size_t end = num_layers;
  for (size_t stage = num_stages; stage-- > 0 && cut.value < kImpossible;) {
    end = begins[stage][end];
    cut.begins.insert(cut.begins.begin(), end);
  }
  return cut;
}

// Returns the cut whose largest stage cost is the least.
Cut minimax_cut(const Sums& sums, size_t num_stages, double memory_weight) {
  return best_cut(
      sums.num_layers(),
      num_stages,
      [&](size_t stage, size_t begin, size_t end) {
        return sums.cost(stage, begin, end, memory_weight);
      },
      [](double before, double cost) { return std::max(before, cost); });
}

[[noreturn]] void throw_limit_too_low(std::span<const LayerCost> layers, PartitionOptions options) {
  const int64_t limit = *options.memory_limit;
  options.memory_limit.reset();
  const Sums sums(layers, options);
  const auto num_stages = static_cast<size_t>(options.num_stages);
  const Cut cut = minimax_cut(sums, num_stages, 1);
  int64_t least = 0;
  for (size_t stage = 0; stage < num_stages; ++stage) {
    const size_t end = stage + 1 < num_stages ? cut.begins[stage + 1] : layers.size();
    least = std::max(least, sums.bytes(stage, cut.begins[stage], end));
  }
  throw std::invalid_argument("partition: no cut of " + std::to_string(layers.size()) +
                              " layers into " + std::to_string(num_stages) +
                              " stages keeps each within " + std::to_string(limit) +
                              " bytes; allow " + std::to_string(least) + ", or use more stages");
}

}  // namespace

Partition partition(std::span<const LayerCost> layers, const PartitionOptions& options) {
  check_arguments(layers, options);
  const Sums sums(layers, options);
  const auto num_stages = static_cast<size_t>(options.num_stages);
  const double worst = minimax_cut(sums, num_stages, options.memory_weight).value;
  if (worst == kImpossible) {
    throw_limit_too_low(layers, options);
  }
  // A tolerance for rounding: sums of the same layers in another order differ in the last bits.
  const double allowed = worst * (1 + 1e-12);
  const Cut cut = best_cut(
      layers.size(),
      num_stages,
      [&](size_t stage, size_t begin, size_t end) {
        const double cost = sums.cost(stage, begin, end, options.memory_weight);
        return cost <= allowed ? cost * cost : kImpossible;
      },
      [](double before, double cost) { return before + cost; });
  Partition result;
  for (size_t stage = 0; stage < num_stages; ++stage) {
    const size_t begin = cut.begins[stage];
    const size_t end = stage + 1 < num_stages ? cut.begins[stage + 1] : layers.size();
    result.begins.push_back(static_cast<int64_t>(begin));
    result.times.push_back(sums.time(begin, end));
    result.bytes.push_back(sums.bytes(stage, begin, end));
  }
  return result;
}

}  // namespace weft::strategy
