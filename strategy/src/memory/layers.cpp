#include "layers.h"

#include <utility>

namespace weft::strategy::detail {

namespace {

// The size of the state of torch's CPU generator, which an activation checkpoint saves.
constexpr int64_t kRandomStateBytes = 5056;

}  // namespace

Mlp::Mlp(RankMemory& memory, std::vector<std::string> layers)
    : memory_(&memory),
      layers_(std::move(layers)),
      is_gated_(layers_.size() == 3),
      recompute_(memory.style(layers_.front()).recompute),
      is_fused_(memory.style(layers_.front()).is_fused),
      is_summed_(memory.style(layers_.back()).style == Style::kRow),
      dim_(memory.weight_dim_size(layers_.front(), 1)),
      hidden_(memory.weight_dim_size(layers_.front(), 0)) {}

Buffer Mlp::forward(int64_t rows, const Buffer& x) {
  const int64_t hidden = rows * hidden_;
  x_ = x;
  const auto hidden_product = [&] {
    return recompute_ ? memory_->scratch_product(hidden) : memory_->saved_product(hidden);
  };
  Buffer gate = hidden_product();
  Buffer up = is_gated_ ? hidden_product() : Buffer();
  Buffer down_input = is_fused_ ? memory_->scratch(hidden) : memory_->saved(hidden);
  if (!is_fused_) {
    activated_ = is_gated_ ? memory_->saved(hidden) : Buffer();
    down_input_ = std::move(down_input);
  }
  Buffer y = memory_->scratch_product(rows * dim_);
  if (is_summed_) {
    memory_->communicate(rows * dim_ * 4);
  }
  if (!recompute_) {
    gate_ = std::move(gate);
    up_ = std::move(up);
  }
  return y;
}

Buffer Mlp::backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad) {
  return is_fused_ ? fused_backward(rows, grad_y, needs_input_grad)
                   : layered_backward(rows, grad_y, needs_input_grad);
}

// Follows torch's autograd through linear layers, an activation and a product.
Buffer Mlp::layered_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows * hidden_;
  Buffer grad_down_input = memory_->scratch(hidden);
  {
    const Buffer expanded = grad_y ? Buffer() : memory_->scratch(rows * dim_);
    memory_->make_gradients(layers_.back());
  }
  down_input_.reset();
  Buffer grad_up = is_gated_ ? memory_->scratch(hidden) : Buffer();
  Buffer grad_activated = is_gated_ ? memory_->scratch(hidden) : std::move(grad_down_input);
  grad_down_input.reset();
  activated_.reset();
  up_.reset();
  Buffer grad_x = needs_input_grad ? memory_->scratch(rows * dim_) : Buffer();
  if (is_gated_) {
    memory_->make_gradients(layers_[1]);
    grad_up.reset();
  }
  const Buffer grad_gate = memory_->scratch(hidden);
  grad_activated.reset();
  gate_.reset();
  const Buffer own_grad_x =
      needs_input_grad && is_gated_ ? memory_->scratch(rows * dim_) : Buffer();
  memory_->make_gradients(layers_.front());
  x_.reset();
  return grad_x;
}

Buffer Mlp::fused_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows * hidden_;
  if (recompute_) {
    gate_ = memory_->scratch(hidden);
    up_ = is_gated_ ? memory_->scratch(hidden) : Buffer();
  }
  Buffer grad_down_input = memory_->scratch(hidden);
  Buffer grad_gate = memory_->scratch(hidden);
  Buffer grad_up = is_gated_ ? memory_->scratch(hidden) : Buffer();
  Buffer down_input = memory_->scratch(hidden);
  grad_down_input.reset();
  if (recompute_) {
    gate_.reset();
    up_.reset();
  }
  Buffer grad_x = needs_input_grad ? memory_->scratch(rows * dim_) : Buffer();
  {
    // The gradient of a sum is a scalar, expanded to a matrix for the matrix product.
    const int64_t features = memory_->rows_at_once(layers_.back());
    const Buffer expanded = grad_y ? Buffer() : memory_->scratch(rows * features);
    memory_->make_mlp_gradients(layers_.back());
  }
  gate_.reset();  // autograd frees a node's saved tensors when its backward ends
  up_.reset();
  down_input.reset();
  if (is_gated_) {
    memory_->make_mlp_gradients(layers_[1]);
    grad_up.reset();
  }
  memory_->make_mlp_gradients(layers_.front());
  x_.reset();
  return grad_x;
}

RmsNorm::RmsNorm(RankMemory& memory, std::string name, int64_t dim)
    : memory_(&memory), name_(std::move(name)), dim_(dim) {}

Buffer RmsNorm::forward(int64_t rows, const Buffer& x) {
  x_ = x;
  { const Buffer squares = memory_->scratch(rows * dim_); }
  scale_ = memory_->saved_wide(rows);
  normed_ = memory_->saved_wide(rows * dim_);
  return memory_->saved_wide(rows * dim_);
}

Buffer RmsNorm::backward(int64_t rows, const Buffer& /*grad_y*/) {
  Buffer grad_normed = memory_->scratch(rows * dim_);
  {
    const Buffer product = memory_->scratch(rows * dim_);
    memory_->make_gradients(name_);
  }
  normed_.reset();
  Buffer grad_x = memory_->scratch(rows * dim_);
  { const Buffer product = memory_->scratch(rows * dim_); }
  grad_normed.reset();
  const Buffer grad_from_scale = memory_->scratch(rows * dim_);
  x_.reset();
  scale_.reset();
  return grad_x;
}

Attention::Attention(RankMemory& memory, const std::string& name, const DecoderModel& model)
    : memory_(&memory),
      name_(name),
      dim_(model.dim),
      query_dim_(memory.weight_dim_size(name + ".q_proj", 0)),
      kv_dim_(memory.weight_dim_size(name + ".k_proj", 0)),
      is_summed_(memory.style(name + ".o_proj").style == Style::kRow),
      num_heads_(query_dim_ / model.head_dim) {}

// Computes x * cos + cat(-b, a) * sin, where a and b are the halves of each head of x.
Buffer Attention::apply_rotary(int64_t num) {
  const Buffer x = memory_->scratch_product(num);
  const Buffer by_cos = memory_->scratch(num);
  Buffer rotated;
  {
    const Buffer negative = memory_->scratch(num / 2);
    rotated = memory_->scratch(num);
  }
  const Buffer by_sin = memory_->scratch(num);
  rotated.reset();
  return memory_->saved(num);
}

Buffer Attention::forward(int64_t rows, const Buffer& x) {
  x_ = x;
  query_ = apply_rotary(rows * query_dim_);
  key_ = apply_rotary(rows * kv_dim_);
  value_ = memory_->saved_product(rows * kv_dim_);
  output_ = memory_->saved_product(rows * query_dim_);
  logsumexp_ = memory_->product(MemoryCategory::kSavedActivations, rows * num_heads_ * 4);
  Buffer y = memory_->scratch_product(rows * dim_);
  if (is_summed_) {
    memory_->communicate(rows * dim_ * 4);
  }
  return y;
}

Buffer Attention::backward(int64_t rows, const Buffer& /*grad_y*/) {
  const int64_t query = rows * query_dim_;
  const int64_t key = rows * kv_dim_;
  Buffer grad_output = memory_->scratch(query);
  memory_->make_gradients(name_ + ".o_proj");
  Buffer grad_query = memory_->scratch(query);
  Buffer grad_key = memory_->scratch(key);
  Buffer grad_value = memory_->scratch(key);
  grad_output.reset();
  output_.reset();
  query_.reset();
  key_.reset();
  value_.reset();
  logsumexp_.reset();
  // The gradients of x through the three projections are added up one by one.
  memory_->make_gradients(name_ + ".v_proj");
  Buffer grad_x = memory_->scratch(rows * dim_);
  grad_value.reset();
  for (const bool is_key : {true, false}) {
    Buffer& grad = is_key ? grad_key : grad_query;
    {
      const int64_t num = is_key ? key : query;
      const Buffer rotated_back = memory_->scratch(num);
      const Buffer joined = memory_->scratch(num);
      const Buffer sum = memory_->scratch(num);
    }
    const Buffer own_grad_x = memory_->scratch(rows * dim_);
    memory_->make_gradients(name_ + (is_key ? ".k_proj" : ".q_proj"));
    grad.reset();
  }
  x_.reset();
  return grad_x;
}

Block::Layers::Layers(RankMemory& memory, const DecoderModel& model, const std::string& name)
    : attention_norm(memory, name + ".input_layernorm", model.dim),
      mlp_norm(memory, name + ".post_attention_layernorm", model.dim),
      attention(memory, name + ".self_attn", model),
      mlp(memory, {name + ".mlp.gate_proj", name + ".mlp.up_proj", name + ".mlp.down_proj"}) {}

Block::Block(RankMemory& memory,
             const DecoderModel& model,
             int64_t layer,
             Checkpointing checkpointing)
    : memory_(&memory),
      dim_(model.dim),
      checkpointing_(checkpointing),
      layers_(memory, model, "model.layers." + std::to_string(layer)),
      empty_(layers_) {}

Buffer Block::run(int64_t rows, const Buffer& x, bool saves_activations) {
  // Without saves_activations, a layer's buffers are released when its forward ends.
  const auto release = [&](auto& layer, const auto& empty) {
    if (!saves_activations) {
      layer = empty;
    }
  };
  {
    const Buffer normed = layers_.attention_norm.forward(rows, x);
    release(layers_.attention_norm, empty_.attention_norm);
    const Buffer attention_output = layers_.attention.forward(rows, normed);
    release(layers_.attention, empty_.attention);
    layers_.residual = memory_->saved_wide(rows * dim_);
  }
  const Buffer normed = layers_.mlp_norm.forward(rows, layers_.residual);
  release(layers_.mlp_norm, empty_.mlp_norm);
  const Buffer mlp_output = layers_.mlp.forward(rows, normed);
  release(layers_.mlp, empty_.mlp);
  return memory_->saved_wide(rows * dim_);
}

Buffer Block::forward(int64_t rows, const Buffer& x) {
  if (checkpointing_ == Checkpointing::kSelective) {
    memory_->begin_recording(tape_);
  }
  Buffer y = run(rows, x, checkpointing_ == Checkpointing::kNone);
  memory_->end_recording();
  if (checkpointing_ != Checkpointing::kNone) {
    layers_ = empty_;
    x_ = x;
    random_state_ = memory_->hold_bytes(MemoryCategory::kSavedActivations, kRandomStateBytes);
  }
  return y;
}

Buffer Block::backward(int64_t rows, const Buffer& grad_y) {
  if (checkpointing_ != Checkpointing::kNone) {
    memory_->begin_recomputation(tape_);
    run(rows, x_, true);
    memory_->end_recomputation();
  }
  Buffer grad_residual;
  {
    const Buffer grad_normed = layers_.mlp.backward(rows, grad_y, true);
    const Buffer grad_branch = layers_.mlp_norm.backward(rows, grad_normed);
    grad_residual = memory_->scratch(rows * dim_);
  }
  layers_.residual.reset();
  const Buffer grad_normed = layers_.attention.backward(rows, grad_residual);
  const Buffer grad_branch = layers_.attention_norm.backward(rows, grad_normed);
  x_.reset();
  random_state_.reset();
  return memory_->scratch(rows * dim_);
}

}  // namespace weft::strategy::detail
