#pragma once

#include "machine.h"

#include <string>
#include <vector>

namespace weft::strategy::detail {

// Layers as they run on a rank: a forward holds what autograd keeps, its backward lets go of it.
// Every `rows` of an activation is a token; what a layer is given is held by its caller, too.
//
// Eager kernels, operator by operator; temporaries smaller than a row of a hidden size are left
// out.

// An MLP: one column_row_mlp, or its layers by themselves.
class Mlp {
 public:
  // Names of the layers: gate, up and down, or up and down.
  Mlp(Machine& machine, std::vector<std::string> layers);

  // `x` is held by this where the backward needs it. `needs_input_grad`: not for a batch.
  Buffer forward(int64_t rows, const Buffer& x);
  Buffer backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad);

 private:
  Buffer fused_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad);
  Buffer layered_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad);

  Machine* machine_;
  std::vector<std::string> layers_;
  bool is_gated_;
  bool recompute_;
  bool is_fused_;
  bool is_summed_;  // over the ranks
  int64_t dim_;
  int64_t hidden_;
  Buffer x_, gate_, up_;
  Buffer activated_, product_;  // of layers by themselves
};

// x / rms(x) * weight, in the steps that torch takes on the CPU.
class RmsNorm {
 public:
  RmsNorm(Machine& machine, std::string name, int64_t dim);

  // `x` is kept.
  Buffer forward(int64_t rows, const Buffer& x);
  Buffer backward(int64_t rows, const Buffer& grad_y);

 private:
  Machine* machine_;
  std::string name_;
  int64_t dim_;
  Buffer x_, normed_, scale_;
};

// Causal attention with rotary positions by scaled_dot_product_attention.
class Attention {
 public:
  Attention(Machine& machine, const std::string& name, const DecoderModel& model);

  Buffer forward(int64_t rows, const Buffer& x);
  Buffer backward(int64_t rows, const Buffer& grad_y);

 private:
  Buffer rotated(int64_t num);

  Machine* machine_;
  std::string name_;
  int64_t dim_;
  int64_t query_dim_;
  int64_t kv_dim_;
  bool is_summed_;  // over the ranks
  int64_t num_heads_;
  Buffer x_, query_, key_, value_, output_, sums_;
};

class Block {
 public:
  Block(Machine& machine, const DecoderModel& model, int64_t layer, Checkpointing checkpointing);

  // `x` is kept; the result counts as saved.
  Buffer forward(int64_t rows, const Buffer& x);
  Buffer backward(int64_t rows, const Buffer& grad_y);

 private:
  // The layers, with what they hold.
  struct Parts {
    Parts(Machine& machine, const DecoderModel& model, const std::string& name);

    RmsNorm attention_norm, mlp_norm;
    Attention attention;
    Mlp mlp;
    Buffer middle;  // between attention and MLP
  };

  // The forward; `is_kept`: with all that autograd saves.
  Buffer run(int64_t rows, const Buffer& x, bool is_kept);

  Machine* machine_;
  int64_t dim_;
  Checkpointing checkpointing_;
  Parts parts_;
  Parts empty_;  // as before any forward
  Buffer x_, random_state_;
  Machine::Tape tape_;  // what a selective checkpoint keeps
};

}  // namespace weft::strategy::detail
