#pragma once

#include "rank_memory.h"
#include "sequence_shards.h"

#include <string>
#include <vector>

namespace weft::strategy::detail {

// Simulates the memory of a rank's layers as torch's eager kernels allocate it, operator by
// operator. A forward holds the buffers of the tensors that autograd saves; the backward releases
// them. Buffers of temporaries are held for the temporaries' lifetime. Temporaries of a few
// elements per token are left out.
//
// `rows` are the tokens of a micro-batch; a norm gets the number of tokens of its input. The caller
// of a layer also holds the layer's input.

// An MLP: one fused column_row_mlp, or separate layers.
class Mlp {
 public:
  // `layers`: the names of the linear layers gate, up and down, or of up and down.
  Mlp(RankMemory& memory, std::vector<std::string> layers);

  // Holds `x` until the backward. `needs_input_grad` is false if `x` is the batch.
  Buffer forward(const Rows& rows, const Buffer& x);
  Buffer backward(const Rows& rows, const Buffer& grad_y, bool needs_input_grad);

 private:
  Buffer fused_backward(const Rows& rows, const Buffer& grad_y, bool needs_input_grad);
  Buffer layered_backward(const Rows& rows, const Buffer& grad_y, bool needs_input_grad);
  Buffer gather_gradient(const Rows& rows);
  void make_gradients(const std::string& layer);
  void free_saved();
  RankMemory* memory_;
  std::vector<std::string> layers_;
  bool is_gated_;
  bool recompute_;
  bool is_fused_;
  bool is_summed_;  // whether the output is all-reduced
  int64_t dim_;
  int64_t hidden_;
  Buffer x_, gate_, up_;
  Buffer up_input_;                    // of a separate layer, under autocast a copy
  std::vector<Buffer> weight_copies_;  // under autocast
  // Only for separate layers: the activated gate of a gated MLP, and the input of the last layer.
  Buffer activated_, down_input_;
};

// x / rms(x) * weight, in torch's steps on the CPU.
class RmsNorm {
 public:
  RmsNorm(RankMemory& memory, std::string name, int64_t dim);

  // Holds `x`, or a float32 copy of it, until the backward.
  Buffer forward(int64_t rows, const Buffer& x);
  Buffer backward(int64_t rows, Buffer grad_y);

 private:
  RankMemory* memory_;
  std::string name_;
  int64_t dim_;
  Buffer x_, normed_, scale_;
};

// Causal attention with rotary positions, computed by scaled_dot_product_attention.
class Attention {
 public:
  Attention(RankMemory& memory, const std::string& name, const DecoderModel& model);

  Buffer forward(const Rows& rows, const Buffer& x);
  Buffer backward(const Rows& rows);

 private:
  // The tensors that a projection saves in addition to its parameters.
  struct Copies {
    Buffer weight, input;
  };

  Copies copies_of(const std::string& projection, int64_t rows);
  Buffer apply_rotary(int64_t num);
  void rotate_back(int64_t num, Buffer& grad);
  Buffer project_back(const std::string& projection, int64_t num, Copies& copies, Buffer& grad);

  RankMemory* memory_;
  std::string name_;
  int64_t dim_;
  int64_t query_dim_;
  int64_t kv_dim_;
  bool is_summed_;  // whether the output is all-reduced
  int64_t num_heads_;
  Copies query_copies_, key_copies_, value_copies_, output_copies_;
  Buffer x_, query_, key_, value_, output_, logsumexp_;
};

class Block {
 public:
  // The position of a block in its stage. With sequence parallelism, the first block shards the
  // tokens, and the last one gathers them.
  struct Position {
    bool is_first = false;
    bool is_last = false;
  };

  Block(RankMemory& memory,
        const DecoderModel& model,
        int64_t layer,
        Checkpointing checkpointing,
        Position position);

  // Holds `x` until the backward; the result counts as saved.
  Buffer forward(const Rows& rows, const Buffer& x);
  Buffer backward(const Rows& rows, Buffer grad_y);

 private:
  // The layers with the buffers that they hold.
  struct Layers {
    Layers(RankMemory& memory, const DecoderModel& model, const std::string& name);

    RmsNorm attention_norm, mlp_norm;
    Attention attention;
    Mlp mlp;
    Buffer residual;  // the residual stream between attention and MLP
  };

  // Runs the forward. If `saves_activations`, the layers keep holding the tensors that autograd
  // saves.
  Buffer run(const Rows& rows, const Buffer& x, bool saves_activations);

  RankMemory* memory_;
  int64_t dim_;
  Checkpointing checkpointing_;
  Position position_;
  Layers layers_;
  Layers empty_;  // the layers before any forward, without buffers
  Buffer x_, random_state_;
  RankMemory::Tape tape_;  // the tensors that a selective checkpoint keeps
};

}  // namespace weft::strategy::detail
