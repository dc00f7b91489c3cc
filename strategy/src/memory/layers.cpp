#include "layers.h"

#include <utility>

namespace weft::strategy::detail {

namespace {

constexpr int64_t kRandomStateBytes = 5056;  // of torch's CPU generator, which a checkpoint keeps

}  // namespace

Mlp::Mlp(Machine& machine, std::vector<std::string> layers)
    : machine_(&machine),
      layers_(std::move(layers)),
      is_gated_(layers_.size() == 3),
      recompute_(machine.style(layers_.front()).recompute),
      is_fused_(machine.style(layers_.front()).is_fused),
      is_summed_(machine.style(layers_.back()).style == Style::kRow),
      dim_(machine.weight_dim(layers_.front(), 1)),
      hidden_(machine.weight_dim(layers_.front(), 0)) {}

Buffer Mlp::forward(int64_t rows, const Buffer& x) {
  const int64_t hidden = rows * hidden_;
  x_ = x;
  const auto hidden_product = [&] {
    return recompute_ ? machine_->scratch_product(hidden) : machine_->saved_product(hidden);
  };
  Buffer gate = hidden_product();
  Buffer up = is_gated_ ? hidden_product() : Buffer();
  Buffer product = is_fused_ ? machine_->scratch(hidden) : machine_->saved(hidden);
  if (!is_fused_) {
    activated_ = is_gated_ ? machine_->saved(hidden) : Buffer();
    product_ = std::move(product);
  }
  Buffer y = machine_->scratch_product(rows * dim_);
  if (is_summed_) {
    machine_->communicate(rows * dim_ * 4);
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

// As torch's autograd goes through linear layers, an activation and a product.
Buffer Mlp::layered_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows * hidden_;
  Buffer grad_product = machine_->scratch(hidden);
  {
    const Buffer expanded = grad_y ? Buffer() : machine_->scratch(rows * dim_);
    machine_->make_gradients(layers_.back());
  }
  product_.reset();
  Buffer grad_up = is_gated_ ? machine_->scratch(hidden) : Buffer();
  Buffer grad_activated = is_gated_ ? machine_->scratch(hidden) : std::move(grad_product);
  grad_product.reset();
  activated_.reset();
  up_.reset();
  Buffer grad_x = needs_input_grad ? machine_->scratch(rows * dim_) : Buffer();
  if (is_gated_) {
    machine_->make_gradients(layers_[1]);
    grad_up.reset();
  }
  const Buffer grad_gate = machine_->scratch(hidden);
  grad_activated.reset();
  gate_.reset();
  const Buffer own_grad_x =
      needs_input_grad && is_gated_ ? machine_->scratch(rows * dim_) : Buffer();
  machine_->make_gradients(layers_.front());
  x_.reset();
  return grad_x;
}

Buffer Mlp::fused_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows * hidden_;
  if (recompute_) {
    gate_ = machine_->scratch(hidden);
    up_ = is_gated_ ? machine_->scratch(hidden) : Buffer();
  }
  Buffer grad_product = machine_->scratch(hidden);
  Buffer grad_gate = machine_->scratch(hidden);
  Buffer grad_up = is_gated_ ? machine_->scratch(hidden) : Buffer();
  Buffer product = machine_->scratch(hidden);
  grad_product.reset();
  if (recompute_) {
    gate_.reset();
    up_.reset();
  }
  Buffer grad_x = needs_input_grad ? machine_->scratch(rows * dim_) : Buffer();
  {
    // The gradient of a sum is one number, made a matrix for the product.
    const int64_t features = machine_->rows_at_once(layers_.back());
    const Buffer expanded = grad_y ? Buffer() : machine_->scratch(rows * features);
    machine_->make_mlp_gradients(layers_.back());
  }
  gate_.reset();  // autograd lets go of what it has saved when the node is done
  up_.reset();
  product.reset();
  if (is_gated_) {
    machine_->make_mlp_gradients(layers_[1]);
    grad_up.reset();
  }
  machine_->make_mlp_gradients(layers_.front());
  x_.reset();
  return grad_x;
}

RmsNorm::RmsNorm(Machine& machine, std::string name, int64_t dim)
    : machine_(&machine), name_(std::move(name)), dim_(dim) {}

Buffer RmsNorm::forward(int64_t rows, const Buffer& x) {
  x_ = x;
  { const Buffer squares = machine_->scratch(rows * dim_); }
  scale_ = machine_->saved_wide(rows);
  normed_ = machine_->saved_wide(rows * dim_);
  return machine_->saved_wide(rows * dim_);
}

Buffer RmsNorm::backward(int64_t rows, const Buffer& /*grad_y*/) {
  Buffer grad_normed = machine_->scratch(rows * dim_);
  {
    const Buffer product = machine_->scratch(rows * dim_);
    machine_->make_gradients(name_);
  }
  normed_.reset();
  Buffer grad_x = machine_->scratch(rows * dim_);
  { const Buffer product = machine_->scratch(rows * dim_); }
  grad_normed.reset();
  const Buffer of_scale = machine_->scratch(rows * dim_);
  x_.reset();
  scale_.reset();
  return grad_x;
}

Attention::Attention(Machine& machine, const std::string& name, const DecoderModel& model)
    : machine_(&machine),
      name_(name),
      dim_(model.dim),
      query_dim_(machine.weight_dim(name + ".q_proj", 0)),
      kv_dim_(machine.weight_dim(name + ".k_proj", 0)),
      is_summed_(machine.style(name + ".o_proj").style == Style::kRow),
      num_heads_(query_dim_ / model.head_dim) {}

// x * cos + cat(-second, first) * sin
Buffer Attention::rotated(int64_t num) {
  const Buffer x = machine_->scratch_product(num);
  const Buffer by_cos = machine_->scratch(num);
  Buffer turned;
  {
    const Buffer negative = machine_->scratch(num / 2);
    turned = machine_->scratch(num);
  }
  const Buffer by_sin = machine_->scratch(num);
  turned.reset();
  return machine_->saved(num);
}

Buffer Attention::forward(int64_t rows, const Buffer& x) {
  x_ = x;
  query_ = rotated(rows * query_dim_);
  key_ = rotated(rows * kv_dim_);
  value_ = machine_->saved_product(rows * kv_dim_);
  output_ = machine_->saved_product(rows * query_dim_);
  sums_ = machine_->product(MemoryCategory::kSavedActivations, rows * num_heads_ * 4);
  Buffer y = machine_->scratch_product(rows * dim_);
  if (is_summed_) {
    machine_->communicate(rows * dim_ * 4);
  }
  return y;
}

Buffer Attention::backward(int64_t rows, const Buffer& /*grad_y*/) {
  const int64_t query = rows * query_dim_;
  const int64_t key = rows * kv_dim_;
  Buffer grad_output = machine_->scratch(query);
  machine_->make_gradients(name_ + ".o_proj");
  Buffer grad_query = machine_->scratch(query);
  Buffer grad_key = machine_->scratch(key);
  Buffer grad_value = machine_->scratch(key);
  grad_output.reset();
  output_.reset();
  query_.reset();
  key_.reset();
  value_.reset();
  sums_.reset();
  // Each projection's gradient of x is added to those before it.
  machine_->make_gradients(name_ + ".v_proj");
  Buffer grad_x = machine_->scratch(rows * dim_);
  grad_value.reset();
  for (const bool is_key : {true, false}) {
    Buffer& grad = is_key ? grad_key : grad_query;
    {
      const int64_t num = is_key ? key : query;
      const Buffer turned_back = machine_->scratch(num);
      const Buffer joined = machine_->scratch(num);
      const Buffer sum = machine_->scratch(num);
    }
    const Buffer own = machine_->scratch(rows * dim_);
    machine_->make_gradients(name_ + (is_key ? ".k_proj" : ".q_proj"));
    grad.reset();
  }
  x_.reset();
  return grad_x;
}

Block::Parts::Parts(Machine& machine, const DecoderModel& model, const std::string& name)
    : attention_norm(machine, name + ".input_layernorm", model.dim),
      mlp_norm(machine, name + ".post_attention_layernorm", model.dim),
      attention(machine, name + ".self_attn", model),
      mlp(machine, {name + ".mlp.gate_proj", name + ".mlp.up_proj", name + ".mlp.down_proj"}) {}

Block::Block(Machine& machine,
             const DecoderModel& model,
             int64_t layer,
             Checkpointing checkpointing)
    : machine_(&machine),
      dim_(model.dim),
      checkpointing_(checkpointing),
      parts_(machine, model, "model.layers." + std::to_string(layer)),
      empty_(parts_) {}

Buffer Block::run(int64_t rows, const Buffer& x, bool is_kept) {
  // What nothing keeps goes when the layer that made it is done.
  const auto let_go = [&](auto& part, const auto& empty) {
    if (!is_kept) {
      part = empty;
    }
  };
  {
    const Buffer normed = parts_.attention_norm.forward(rows, x);
    let_go(parts_.attention_norm, empty_.attention_norm);
    const Buffer mixed = parts_.attention.forward(rows, normed);
    let_go(parts_.attention, empty_.attention);
    parts_.middle = machine_->saved_wide(rows * dim_);
  }
  const Buffer normed = parts_.mlp_norm.forward(rows, parts_.middle);
  let_go(parts_.mlp_norm, empty_.mlp_norm);
  const Buffer transformed = parts_.mlp.forward(rows, normed);
  let_go(parts_.mlp, empty_.mlp);
  return machine_->saved_wide(rows * dim_);
}

Buffer Block::forward(int64_t rows, const Buffer& x) {
  if (checkpointing_ == Checkpointing::kSelective) {
    machine_->begin_recording(tape_);
  }
  Buffer y = run(rows, x, checkpointing_ == Checkpointing::kNone);
  machine_->end_recording();
  if (checkpointing_ != Checkpointing::kNone) {
    parts_ = empty_;
    x_ = x;
    random_state_ = machine_->hold_bytes(MemoryCategory::kSavedActivations, kRandomStateBytes);
  }
  return y;
}

Buffer Block::backward(int64_t rows, const Buffer& grad_y) {
  if (checkpointing_ != Checkpointing::kNone) {
    machine_->begin_recomputation(tape_);
    run(rows, x_, true);
    machine_->end_recomputation();
  }
  Buffer grad_middle;
  {
    const Buffer grad_normed = parts_.mlp.backward(rows, grad_y, true);
    const Buffer grad_branch = parts_.mlp_norm.backward(rows, grad_normed);
    grad_middle = machine_->scratch(rows * dim_);
  }
  parts_.middle.reset();
  const Buffer grad_normed = parts_.attention.backward(rows, grad_middle);
  const Buffer grad_branch = parts_.attention_norm.backward(rows, grad_normed);
  x_.reset();
  random_state_.reset();
  return machine_->scratch(rows * dim_);
}

}  // namespace weft::strategy::detail
