// The order of DualPipe for one direction, folded into a V: where both stages of a rank have work,
// a forward of one alternates with a backward of the other.

#include "v_schedules.h"

#include <algorithm>
#include <map>
#include <utility>

namespace weft::strategy::detail {

namespace {

using Actions = std::vector<Action>;

// Writes a rank's list: the next micro-batch of a stage each time.
class Writer {
 public:
  explicit Writer(int64_t num_micro_batches) : num_micro_batches_(num_micro_batches) {}

  void forward(int64_t stage) { add(stage, ActionKind::kForward, num_forwards_[stage]++); }
  void backward(int64_t stage) { add(stage, ActionKind::kBackward, num_backwards_[stage]++); }

  void input_half(int64_t stage) {
    const int64_t micro_batch = num_backwards_[stage]++;
    add(stage, ActionKind::kBackwardInput, micro_batch);
    delayed_.emplace_back(stage, micro_batch);
  }

  // Adds the weight half that was delayed first.
  void weight_half() {
    const auto [stage, micro_batch] = delayed_.at(num_weight_halves_++);
    add(stage, ActionKind::kBackwardWeight, micro_batch);
  }

  Actions list;

 private:
  // Micro-batches that the schedule does not have are left out.
  void add(int64_t stage, ActionKind kind, int64_t micro_batch) {
    if (micro_batch < num_micro_batches_) {
      list.push_back({static_cast<int32_t>(stage), static_cast<int32_t>(micro_batch), kind});
    }
  }

  int64_t num_micro_batches_;
  std::map<int64_t, int64_t> num_forwards_;  // by stage
  std::map<int64_t, int64_t> num_backwards_;
  std::vector<std::pair<int64_t, int64_t>> delayed_;  // stages and micro-batches of weight halves
  size_t num_weight_halves_ = 0;
};

// REQUIRES: at least two micro-batches for each rank.
void write(Writer& writer, int64_t p, int64_t m, int64_t rank) {
  const int64_t first = rank;
  const int64_t second = 2 * p - 1 - rank;
  const int64_t after = p - 1 - rank;  // the ranks after this one
  const auto repeat = [](int64_t count, auto body) {
    for (int64_t i = 0; i < count; ++i) {
      body();
    }
  };
  // Warm-up: micro-batches go down the V, and then also up.
  repeat(2 * after, [&] { writer.forward(first); });
  repeat(rank + 1, [&] {
    writer.forward(first);
    writer.forward(second);
  });
  repeat(after, [&] {
    writer.input_half(second);
    writer.weight_half();
    writer.forward(second);
  });
  // Steady state: forwards alternate with backwards of the other stage.
  repeat(m - 2 * p + rank + 1, [&] {
    writer.forward(first);
    writer.backward(second);
    writer.forward(second);
    writer.backward(first);
  });
  // Cool-down: the last p backwards are split, and their weight halves fill the bubble.
  repeat(after, [&] {
    writer.backward(second);
    writer.forward(second);
    writer.backward(first);
  });
  for (int64_t i = 0; i < 2 * (rank + 1); ++i) {
    const int64_t stage = i % 2 == 0 ? second : first;
    if (i <= rank) {
      writer.backward(stage);
    } else {
      writer.input_half(stage);
    }
  }
  repeat(after, [&] {
    writer.weight_half();
    writer.input_half(first);
  });
  repeat(rank + 1, [&] { writer.weight_half(); });
}

}  // namespace

// For fewer micro-batches than two for each rank, the order is that of two for each rank.
std::vector<Actions> generate_dual_pipe_v(int64_t num_ranks, int64_t num_micro_batches) {
  std::vector<Actions> ranks;
  ranks.reserve(static_cast<size_t>(num_ranks));
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    Writer writer(num_micro_batches);
    write(writer, num_ranks, std::max(num_micro_batches, 2 * num_ranks), rank);
    ranks.push_back(std::move(writer.list));
  }
  return ranks;
}

}  // namespace weft::strategy::detail
