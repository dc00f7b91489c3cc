#pragma once

#include "parameters.h"
#include "timeline.h"

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace weft::strategy::detail {

// One rank's memory while a model trains: its parameters, gradients and states, and what layers
// ask for. Sizes are in elements unless they say bytes.
class Machine {
 public:
  Machine(const TrainingSpec& spec, int64_t global_rank, Timeline& timeline);

  // Activations of a half type have 2 bytes an element, others 4.
  Buffer saved(int64_t num) { return hold_bytes(saved_category(), num * activation_bytes_); }
  Buffer scratch(int64_t num) {
    return hold_bytes(MemoryCategory::kScratch, num * activation_bytes_);
  }
  // Saves what autocast leaves in float32: the stream between layers, norms and the loss.
  Buffer saved_wide(int64_t num) { return hold_bytes(saved_category(), num * wide_bytes_); }
  Buffer hold_bytes(MemoryCategory category, int64_t num_bytes) {
    return timeline_.hold(category, num_bytes);
  }

  // The result of a matrix product, of attention or of communication, of `category` where there is
  // no tape.
  Buffer product(MemoryCategory category, int64_t num_bytes);
  Buffer saved_product(int64_t num) {
    return product(MemoryCategory::kSavedActivations, num * activation_bytes_);
  }
  Buffer scratch_product(int64_t num) {
    return product(MemoryCategory::kScratch, num * activation_bytes_);
  }

  // Until end_recording(), products are saved, and kept on the tape, too.
  using Tape = std::deque<Buffer>;
  void begin_recording(Tape& tape) { recorded_ = &tape; }
  void end_recording() { recorded_ = nullptr; }

  // Until end_recomputation(), what a forward saves is scratch of the backward, and products are
  // taken from the tape as long as it has any.
  void begin_recomputation(Tape& tape) { replayed_ = &tape; }
  void end_recomputation() { replayed_ = nullptr; }

  // This rank's tensor-parallel part of dim `dim` of the weight of a layer.
  [[nodiscard]] int64_t weight_dim(const std::string& module, std::size_t dim) const;
  [[nodiscard]] const ModuleStyle& style(const std::string& module) const;

  // Parameters come to be: as shards, or whole first.
  void initialize();
  void make_optimizer_state();

  // Complete gradients of all of a module's parameters, and the step where it is in the backward.
  void make_gradients(const std::string& module);
  // The same of a layer of a fused MLP, whose weight may be stepped some rows at a time.
  void make_mlp_gradients(const std::string& module);
  // Rows of the gradient of a layer's weight that are multiplied out at a time.
  [[nodiscard]] int64_t rows_at_once(const std::string& module) const;
  // As much as a module's parameters on this rank, for a moment of the caller's choice.
  Buffer weight_sized(const std::string& module);
  // Every parameter has a gradient, of an earlier step.
  void make_all_gradients();
  void drop_gradients();
  void step();

  // Fully sharded units around their forward and backward. Nothing without a data-parallel axis.
  void gather(int64_t unit);
  void release(int64_t unit);
  void reduce_gradients(int64_t unit);

  // The shared memory through which messages of `num_bytes` go: two buffers in turn. One message a
  // step touches one of them, as a step's messages are even in number.
  void communicate(int64_t num_bytes);
  void communicate_once(int64_t num_bytes);

  // Half-precision copies of all weights, where precision is mixed, and of their gradients.
  void copy_weights();
  void copy_gradients();
  void drop_copies();

 private:
  struct Held {
    Buffer parameter;
    Buffer gradient;
    Buffer state;
    Buffer unsharded_gradient;  // until its unit is reduced
  };

  [[nodiscard]] MemoryCategory saved_category() const {
    return replayed_ != nullptr ? MemoryCategory::kScratch : MemoryCategory::kSavedActivations;
  }
  [[nodiscard]] int64_t local_bytes(std::size_t idx) const;      // of the shard on this rank
  [[nodiscard]] int64_t unsharded_bytes(std::size_t idx) const;  // of all data-parallel shards
  [[nodiscard]] int64_t unit_bytes(int64_t unit) const;
  [[nodiscard]] int64_t all_local_bytes() const;
  // What torch's loop makes for one parameter's step; what it still holds when the next one's
  // begins.
  Buffer step_temporaries(int64_t parameter_bytes);
  void complete(std::size_t idx);
  void step_by_rows(std::size_t idx);
  void hold_staging(int64_t first_bytes, int64_t second_bytes);

  const TrainingSpec& spec_;
  Timeline& timeline_;
  Styles styles_;
  std::vector<Parameter> parameters_;
  std::vector<std::vector<int64_t>> shapes_;  // tensor-parallel parts
  std::vector<Held> held_;
  std::unordered_map<std::string, std::vector<std::size_t>> by_module_;
  std::vector<Buffer> unsharded_;  // by unit
  Buffer buffers_;
  Buffer staging_;
  Buffer weight_copies_;
  Buffer gradient_copies_;
  std::array<int64_t, 2> staging_bytes_ = {};
  Tape* recorded_ = nullptr;
  Tape* replayed_ = nullptr;
  int64_t tp_size_ = 1;
  int64_t dp_size_ = 1;
  int64_t activation_bytes_ = 4;
  int64_t wide_bytes_ = 4;
  int64_t parameter_bytes_ = 4;
};

// Sizes of the tensor-parallel and the data-parallel axis; 1 where the mesh has none.
int64_t axis_size(const Mesh& mesh, std::string_view axis);

// Tensors of a parameter's size that an optimizer keeps, and bytes that it keeps beside them.
int64_t num_moments(OptimizerKind optimizer);
int64_t step_count_bytes(OptimizerKind optimizer);

}  // namespace weft::strategy::detail
