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

// One rank's memory while a model trains: its parameters, gradients and optimizer states, and the
// buffers of its layers. Sizes are in elements unless they say bytes.
class RankMemory {
 public:
  RankMemory(const TrainingSpec& spec, int64_t global_rank, Timeline& timeline);

  // Hold an activation of `num` elements: 2 bytes each in half or mixed precision, else 4.
  Buffer saved(int64_t num) { return hold_bytes(saved_category(), num * activation_bytes_); }
  Buffer scratch(int64_t num) {
    return hold_bytes(MemoryCategory::kScratch, num * activation_bytes_);
  }
  // Holds a saved tensor that mixed precision leaves in float32: residual stream, norms and loss.
  Buffer saved_wide(int64_t num) { return hold_bytes(saved_category(), num * wide_bytes_); }
  Buffer hold_bytes(MemoryCategory category, int64_t num_bytes) {
    return timeline_.hold(category, num_bytes);
  }

  // Holds the result of a matrix product, of attention or of communication. `category` applies
  // unless a tape is recorded or replayed.
  Buffer product(MemoryCategory category, int64_t num_bytes);
  Buffer saved_product(int64_t num) {
    return product(MemoryCategory::kSavedActivations, num * activation_bytes_);
  }
  Buffer scratch_product(int64_t num) {
    return product(MemoryCategory::kScratch, num * activation_bytes_);
  }

  // Records a selective checkpoint: until end_recording(), products count as saved, and the tape
  // holds them, too.
  using Tape = std::deque<Buffer>;
  void begin_recording(Tape& tape) { recorded_ = &tape; }
  void end_recording() { recorded_ = nullptr; }

  // Until end_recomputation(), tensors that a forward saves count as scratch of the backward, and
  // products are reused from the tape until the tape is empty.
  void begin_recomputation(Tape& tape) { replayed_ = &tape; }
  void end_recomputation() { replayed_ = nullptr; }

  // Returns the size of dim `dim` of this rank's tensor-parallel shard of a layer's weight.
  [[nodiscard]] int64_t weight_dim_size(const std::string& module, std::size_t dim) const;
  [[nodiscard]] const ModuleStyle& style(const std::string& module) const;

  // Allocates the parameters: as shards, or full first if initialization is not deferred.
  void initialize();
  // Splits float32 weights into bfloat16 and lower bits, if the spec has split weights.
  void split_weights();
  void make_optimizer_state();

  // Allocates the gradients of a module's parameters, and steps if the step is in the backward.
  // With data parallelism, allocates unsharded gradients, which reduce_gradients() completes.
  void make_gradients(const std::string& module);
  // The same for a layer of a fused MLP, whose weight may be stepped some rows at a time.
  void make_mlp_gradients(const std::string& module);
  // Returns the number of rows of a layer's weight gradient that are computed at once.
  [[nodiscard]] int64_t rows_at_once(const std::string& module) const;
  // Holds as many bytes as a module's parameters have, not sharded over data-parallel ranks, until
  // the caller drops the result.
  Buffer weight_sized(const std::string& module);
  // Allocates the gradients of all parameters, which the previous step has left.
  void hold_gradients_of_previous_step();
  void drop_gradients();
  void step();

  // All-gather and release the parameters of a fully sharded unit, and reduce-scatter its
  // gradients. Do nothing without a data-parallel axis.
  void unshard(int64_t unit);
  void reshard(int64_t unit);
  void reduce_gradients(int64_t unit);

  // Grow the two staging buffers, which collectives use in turn, to hold messages of `num_bytes`. A
  // message that is sent once in a step uses the same buffer in each step, because the number of
  // messages in a step is even: communicate_once() grows only that buffer.
  void communicate(int64_t num_bytes);
  void communicate_once(int64_t num_bytes);

  // Allocate and drop half-precision copies of all weights and of their gradients, if the precision
  // is mixed.
  void copy_weights();
  void copy_gradients();
  void drop_copies();

 private:
  struct ParameterBuffers {
    Buffer parameter;
    Buffer gradient;
    Buffer state;
    Buffer low_bits;
    Buffer unsharded_gradient;  // until its unit's gradients are reduced
  };

  [[nodiscard]] MemoryCategory saved_category() const {
    return replayed_ != nullptr ? MemoryCategory::kScratch : MemoryCategory::kSavedActivations;
  }
  // Whether the states, and without a data_parallel axis the weights, are float32 in any format.
  [[nodiscard]] bool is_small(std::size_t idx) const;
  [[nodiscard]] bool is_split(std::size_t idx) const;
  [[nodiscard]] int64_t element_bytes(std::size_t idx) const;   // of the parameter
  [[nodiscard]] int64_t local_elements(std::size_t idx) const;  // of the shard on this rank
  [[nodiscard]] int64_t local_bytes(std::size_t idx) const {
    return local_elements(idx) * element_bytes(idx);
  }
  [[nodiscard]] int64_t moment_bytes(std::size_t idx) const;     // of one of the optimizer's states
  [[nodiscard]] int64_t low_bits_bytes(std::size_t idx) const;   // of split weights
  [[nodiscard]] int64_t unsharded_bytes(std::size_t idx) const;  // sum of data-parallel shards
  [[nodiscard]] int64_t unit_bytes(int64_t unit) const;
  [[nodiscard]] int64_t bytes_of_copies() const;  // of float32 parameters in half precision
  // Allocates the temporaries of torch's loop for one parameter's step. Returns those that it still
  // holds when the next parameter's step begins.
  Buffer step_temporaries(int64_t parameter_bytes);
  // Allocates a parameter's complete gradient, and steps if the step is in the backward.
  void complete_gradient(std::size_t idx);
  void step_by_rows(std::size_t idx);
  void hold_staging(int64_t first_bytes, int64_t second_bytes);

  const TrainingSpec& spec_;
  Timeline& timeline_;
  Styles styles_;
  std::vector<Parameter> parameters_;
  std::vector<std::vector<int64_t>> shapes_;  // of tensor-parallel shards
  std::vector<ParameterBuffers> parameter_buffers_;
  std::unordered_map<std::string, std::vector<std::size_t>> by_module_;
  std::vector<Buffer> unsharded_units_;  // by unit
  Buffer model_buffers_;
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
  int64_t initial_bytes_ = 4;       // of an element of a parameter, before weights are split
  bool has_split_weights_ = false;  // since split_weights()
};

// Returns the size of an axis, 1 if the mesh does not have it.
int64_t axis_size(const Mesh& mesh, std::string_view axis);

// Return the number of tensors of a parameter's size that an optimizer keeps for the parameter, and
// the bytes of its step count.
int64_t num_moments(OptimizerKind optimizer);
int64_t step_count_bytes(OptimizerKind optimizer);

}  // namespace weft::strategy::detail
