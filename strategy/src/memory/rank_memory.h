#pragma once

#include "gradient_buckets.h"
#include "parameters.h"
#include "timeline.h"

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
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
  // Holds a saved tensor of the residual stream: float32 with float32 parameters under autocast.
  Buffer saved_wide(int64_t num) { return hold_bytes(saved_category(), num * wide_bytes_); }
  Buffer scratch_wide(int64_t num) {
    return hold_bytes(MemoryCategory::kScratch, num * wide_bytes_);
  }
  // Hold a float32 tensor in every precision: norms compute in float32.
  Buffer saved_float32(int64_t num) { return hold_bytes(saved_category(), num * 4); }
  Buffer scratch_float32(int64_t num) { return hold_bytes(MemoryCategory::kScratch, num * 4); }
  // Holds a batch of floating-point numbers in the dtype of the parameters.
  Buffer batch(int64_t num) {
    return hold_bytes(MemoryCategory::kSavedActivations, num * initial_bytes_);
  }
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

  // Return the bytes of the result of a matrix product, and of a tensor of the residual stream.
  [[nodiscard]] int64_t product_bytes(int64_t num) const { return num * activation_bytes_; }
  [[nodiscard]] int64_t wide_bytes(int64_t num) const { return num * wide_bytes_; }
  // Returns the bytes of the result of a norm, which autocast leaves in float32.
  [[nodiscard]] int64_t norm_bytes(int64_t num) const {
    return is_autocast() ? num * 4 : wide_bytes(num);
  }
  // Whether layers compute under autocast, which casts inputs and float32 weights of each layer.
  // FSDP2 gathers parameters in half precision instead.
  [[nodiscard]] bool is_autocast() const {
    return spec_.precision == Precision::kAutocast ||
           (spec_.precision == Precision::kHalfMixed && dp_size_ == 1);
  }
  // Whether FSDP2 casts the batch and the parameters that it gathers.
  [[nodiscard]] bool gathers_in_half() const {
    return spec_.precision == Precision::kHalfMixed && dp_size_ > 1;
  }
  // Whether the loss computes on a float32 copy of logits in half precision.
  [[nodiscard]] bool casts_loss() const { return activation_bytes_ == 2; }
  // Whether the residual stream is in half precision, so that norms cast their input.
  [[nodiscard]] bool is_residual_half() const { return wide_bytes_ == 2; }
  // Whether autocast casts a float32 residual stream: rotary positions and the gradients of layers'
  // outputs are float32 then, too.
  [[nodiscard]] bool has_wide_residual() const { return is_autocast() && !is_residual_half(); }
  // Return what a layer saves for its backward in place of its input of `num` elements: `x` itself,
  // or autocast's copy of it; and autocast's copies of a layer's weight and bias, if it makes any.
  Buffer saved_input(int64_t num, const Buffer& x) { return is_autocast() ? saved(num) : x; }
  Buffer saved_weight_copies(const std::string& module);
  // Returns the gradients of a module's parameters in half precision, before they are cast to the
  // parameters' dtype; empty without autocast.
  Buffer gradient_products(const std::string& module);

  // Records a selective checkpoint: until end_recording(), products count as saved, and the tape
  // holds them, too.
  using Tape = std::deque<Buffer>;
  void begin_recording(Tape& tape) { recorded_ = &tape; }
  void end_recording() { recorded_ = nullptr; }

  // Until end_recomputation(), tensors that a forward saves count as scratch of the backward, and
  // products are reused from the tape until the tape is empty.
  void begin_recomputation(Tape& tape) { replayed_ = &tape; }
  void end_recomputation() { replayed_ = nullptr; }
  // Whether the next product is reused, so that the operator that makes it does not run again.
  [[nodiscard]] bool reuses_products() const { return replayed_ != nullptr && !replayed_->empty(); }

  // Returns the size of dim `dim` of this rank's tensor-parallel shard of a layer's weight.
  [[nodiscard]] int64_t weight_dim_size(const std::string& module, std::size_t dim) const;
  [[nodiscard]] const ModuleStyle& style(const std::string& module) const;
  [[nodiscard]] int64_t tp_rank() const { return tp_rank_; }

  // Allocates the parameters: as shards, or full first if initialization is not deferred.
  void initialize();
  // Splits float32 weights into bfloat16 and lower bits, if the spec has split weights.
  void split_weights();
  void make_optimizer_state();
  // Returns the bytes of CPU memory for offloaded states. REQUIRES: split_weights() was called.
  [[nodiscard]] int64_t offloaded_bytes() const;

  // Allocates the gradients of a module's parameters, and steps if the step is in the backward.
  // With data parallelism, allocates unsharded gradients, which reduce_gradients() completes.
  void make_gradients(const std::string& module);
  // The same for a layer of a fused MLP, whose weight may be stepped some rows at a time. The
  // gradients of its layers are results of one autograd node: with several micro-batches, they are
  // added to the sums in add_mlp_gradients(), after the gradients of the last layer.
  void make_mlp_gradients(const std::string& module);
  void add_mlp_gradients();
  // Returns the number of rows of a layer's weight gradient that are computed at once.
  [[nodiscard]] int64_t rows_at_once(const std::string& module) const;
  // Holds as many bytes as a module's parameters have, not sharded over data-parallel ranks, until
  // the caller drops the result.
  Buffer weight_sized(const std::string& module);
  // Allocates the gradients of all parameters, which the previous step has left.
  void hold_gradients_of_previous_step();
  // Allocates the sums of the gradients of all micro-batches but the last. Data-parallel ranks
  // reduce gradients in the last micro-batch only; until then, FSDP2 adds them up unsharded, in
  // float32.
  void hold_accumulated_gradients();
  // Holds the staging buffers in which the previous step has reduced gradients over data-parallel
  // ranks.
  void hold_staging_of_previous_step();
  void drop_gradients();
  void step();

  // All-gather and release the parameters of a fully sharded unit, and reduce-scatter its
  // gradients. Do nothing without a data-parallel axis. In a forward, the buffer that a unit was
  // gathered into lives until the next unit is gathered, or until forward_ends(); the input of a
  // reduce-scatter lives until the next one, or until backward_ends().
  void unshard(int64_t unit);
  void reshard(int64_t unit);
  void reduce_gradients(int64_t unit);
  void forward_ends();
  void backward_ends();
  // Gathers all units of a stage at once, as FSDP2 does for a stage of a pipeline.
  void unshard(const std::vector<int64_t>& units);
  // Returns the FSDP2 units of a stage's layers.
  [[nodiscard]] std::vector<int64_t> units_of(const StageLayers& stage) const;
  // Sets whether gradients are complete after the next backward, so that the optimizer may step in
  // it; at first, they are. In a pipeline, each stage has one backward for each micro-batch.
  void set_completes_gradients(bool value) { completes_gradients_ = value; }
  // Whether a forward frees a unit's parameters when it ends, and the backward gathers them again.
  [[nodiscard]] bool reshards_after_forward() const { return spec_.zero_stage == 3; }
  // Whether FSDP2 gathers a unit while the backward of the unit after it computes: weft switches
  // this off on the CPU, which has no streams.
  [[nodiscard]] bool prefetches() const { return spec_.device == DeviceKind::kCuda; }

  // Grow the two staging buffers, which collectives use in turn, to hold messages of `num_bytes`. A
  // message that is sent once in a step uses the same buffer in each step, because the number of
  // messages in a step is even: communicate_once() grows only that buffer.
  void communicate(int64_t num_bytes);
  void communicate_once(int64_t num_bytes);
  // The same for the all-gathers and reduce-scatters of a sharded sequence, with shards of at most
  // `shard_bytes`.
  void communicate_shards(int64_t shard_bytes);
  // Sums the gradients of a tied weight, of which two ranks of a pipeline have copies: each sends a
  // copy of its gradient and adds up both. Then steps if the step is in the backward.
  void sum_tied_gradients();
  // Holds the rings of shared memory through which this rank sends `num_bytes` to each of some
  // peers of its pipeline.
  void hold_rings(int64_t num_peers, int64_t num_bytes);

 private:
  struct ParameterBuffers {
    Buffer parameter;
    Buffer gradient;
    Buffer state;
    Buffer low_bits;
    Buffer unsharded_gradient;  // or sum of gradients, until its unit's gradients are reduced
  };

  [[nodiscard]] MemoryCategory saved_category() const {
    return replayed_ != nullptr ? MemoryCategory::kScratch : MemoryCategory::kSavedActivations;
  }
  // Returns the number of elements of a module's parameters that autocast casts.
  [[nodiscard]] int64_t num_cast_elements(const std::string& module) const;
  // Whether backwards leave gradients unreduced, because a pipeline reduces them after its
  // schedule.
  [[nodiscard]] bool is_in_stages() const { return spec_.pipeline.has_value(); }
  // Whether gradients of several micro-batches are added up.
  [[nodiscard]] bool sums_gradients() const {
    return spec_.micro_batches > 1 || (spec_.pipeline && spec_.pipeline->micro_batches > 1);
  }
  [[nodiscard]] int64_t unit_of(std::size_t idx) const;
  // Whether another stage has a copy of a parameter, so that this rank has a part of the gradient.
  [[nodiscard]] bool has_copy_elsewhere(std::size_t idx) const;
  // Whether the states, and without a data_parallel axis the weights, are float32 in any format.
  [[nodiscard]] bool is_small(std::size_t idx) const;
  [[nodiscard]] bool is_split(std::size_t idx) const;
  [[nodiscard]] int64_t element_bytes(std::size_t idx) const;   // of the parameter
  [[nodiscard]] int64_t local_elements(std::size_t idx) const;  // of the shard on this rank
  [[nodiscard]] int64_t local_bytes(std::size_t idx) const {
    return local_elements(idx) * element_bytes(idx);
  }
  // Returns the elements that this rank steps: with zero_stage 1, a flat shard.
  [[nodiscard]] int64_t stepped_elements(std::size_t idx) const;
  [[nodiscard]] int64_t moment_bytes(std::size_t idx) const;    // of one of the optimizer's states
  [[nodiscard]] int64_t low_bits_bytes(std::size_t idx) const;  // of split weights
  [[nodiscard]] int64_t gathered_bytes(std::size_t idx) const;  // of one element
  // Returns the bytes of a gathered parameter, in the dtype in which the layers compute.
  [[nodiscard]] int64_t unsharded_bytes(std::size_t idx) const;
  [[nodiscard]] int64_t unit_elements(int64_t unit) const;
  [[nodiscard]] int64_t unit_bytes(int64_t unit) const;
  // Allocates the temporaries of torch's loop for one parameter's step. Returns those that it still
  // holds when the next parameter's step begins.
  Buffer step_temporaries(int64_t parameter_bytes);
  // Returns the bytes of all states of a parameter, without the lower bits of a split weight.
  [[nodiscard]] int64_t state_bytes(std::size_t idx) const;
  // Steps a parameter in the backward, and drops its gradient. `gradients`: what shares its memory.
  void step_in_backward(std::size_t idx, Buffer gradients);
  // Allocates a parameter's gradient, as autograd computes it for a micro-batch.
  Buffer new_gradient(std::size_t idx);
  // Gathers the parameters of which data-parallel ranks have stepped flat shards.
  void gather_stepped();
  // Keeps a gradient, or adds it to the sum of earlier micro-batches; then steps if the step is in
  // the backward and no other rank has a part of the gradient.
  void accumulate(std::size_t idx, Buffer gradient);
  void step_by_rows(std::size_t idx);
  // The two staging buffers of a group.
  struct Staging {
    Buffer buffer;
    std::array<int64_t, 2> num_bytes = {};
  };

  [[nodiscard]] int64_t reduced_staging_bytes(int64_t num_bytes) const;
  void communicate_data(int64_t num_bytes, bool is_gather);  // over the data-parallel group
  void hold_staging(Staging& staging, int64_t first_bytes, int64_t second_bytes);

  const TrainingSpec& spec_;
  Timeline& timeline_;
  Styles styles_;
  std::vector<Parameter> parameters_;
  std::vector<std::vector<int64_t>> shapes_;  // of tensor-parallel shards
  std::vector<ParameterBuffers> parameter_buffers_;
  std::unordered_map<std::string, std::vector<std::size_t>> by_module_;
  std::vector<Buffer> unsharded_units_;  // by unit
  Buffer model_buffers_;
  Staging staging_;               // of the tensor-parallel group
  Staging data_staging_;          // of the data-parallel group
  Staging replica_staging_;       // of the ranks with the same shards
  std::vector<Buffer> rings_;     // to the neighbours in the pipeline
  Buffer gathered_;               // the last unit, as it was gathered in the forward
  Buffer reduced_;                // the gradients of the last unit, as they were reduced
  std::vector<Buffer> averaged_;  // the reduced gradients, which FSDP2 averages over replicas
  std::vector<std::pair<std::size_t, Buffer>> mlp_gradients_;  // with the parameter's index
  std::deque<Buffer> copied_;  // the gradients whose copies to CPU memory are in flight
  bool is_forward_ = true;
  Tape* recorded_ = nullptr;
  Tape* replayed_ = nullptr;
  int64_t tp_size_ = 1;
  int64_t tp_rank_ = 0;
  int64_t dp_size_ = 1;           // ranks over which FSDP2 shards parameters
  int64_t num_replicas_ = 1;      // ranks that average gradients which none of them shards
  int64_t num_state_shards_ = 1;  // ranks that step flat shards
  bool completes_gradients_ = true;
  std::optional<GradientBuckets> buckets_;
  bool has_embedding_ = true;  // the first stage is on this rank
  int64_t activation_bytes_ = 4;
  int64_t wide_bytes_ = 4;
  int64_t initial_bytes_ = 4;       // of an element of a parameter, before weights are split
  bool has_split_weights_ = false;  // since split_weights()
};

// Return the number of tensors of a parameter's size that an optimizer keeps for the parameter, and
// the bytes of its step count.
int64_t num_moments(OptimizerKind optimizer);
int64_t step_count_bytes(OptimizerKind optimizer);

}  // namespace weft::strategy::detail
