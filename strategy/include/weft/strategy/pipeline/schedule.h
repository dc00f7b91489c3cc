#pragma once

#include "weft/strategy/pipeline/action.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy {

// A pipeline schedule: for each pipeline rank, the list of its actions in order.
//
// An immutable value. A rank may have several stages; a stage is on one rank. check() in
// pipeline/check.h verifies what else a schedule must satisfy. add_communication() in
// pipeline/passes.h adds sends and receives to a schedule of compute actions.
class Schedule {
 public:
  Schedule() = default;

  // Throws std::invalid_argument for a rank without compute actions, for negative numbers, for a
  // stage above 16777215, for a stage on two ranks and if one of the stages from 0 to the highest
  // is missing.
  explicit Schedule(std::vector<std::vector<Action>> ranks);

  // Reads CSV: one line per rank, actions separated by commas. Blanks and empty cells are skipped,
  // so that files of torch.distributed.pipelining can be read, too. Throws std::invalid_argument
  // for any other text, and if the constructor throws.
  static Schedule parse(std::string_view csv);
  [[nodiscard]] std::string to_string() const;

  [[nodiscard]] const std::vector<std::vector<Action>>& ranks() const { return ranks_; }
  [[nodiscard]] int64_t num_ranks() const { return static_cast<int64_t>(ranks_.size()); }
  [[nodiscard]] int64_t num_stages() const { return static_cast<int64_t>(rank_of_.size()); }
  [[nodiscard]] int64_t num_micro_batches() const { return num_micro_batches_; }

  // The pipeline rank of each stage.
  [[nodiscard]] std::span<const int32_t> rank_of() const { return rank_of_; }

  // Whether there is a send or a receive.
  [[nodiscard]] bool has_communication() const { return has_communication_; }

  // Whether there is a backward, full or split; a schedule for an evaluation has none.
  [[nodiscard]] bool has_backward() const { return has_backward_; }

  bool operator==(const Schedule& other) const { return ranks_ == other.ranks_; }

 private:
  std::vector<std::vector<Action>> ranks_;
  std::vector<int32_t> rank_of_;
  int64_t num_micro_batches_ = 0;
  bool has_communication_ = false;
  bool has_backward_ = false;
};

}  // namespace weft::strategy
