#include "layers.h"

#include <algorithm>
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
  weight_copies_.clear();
  for (const std::string& layer : layers_) {
    weight_copies_.push_back(memory_->saved_weight_copies(layer));
  }
  x_ = memory_->saved_input(rows * dim_, x);
  if (!is_fused_ && is_gated_) {
    up_input_ = memory_->saved_input(rows * dim_, x);
  }
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
    memory_->communicate(memory_->product_bytes(rows * dim_));
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
  Buffer cast = grad_y && memory_->has_wide_residual() ? memory_->scratch(rows * dim_) : Buffer();
  Buffer grad_down_input = memory_->scratch(hidden);
  {
    const Buffer expanded = grad_y ? Buffer() : memory_->scratch(rows * dim_);
    make_gradients(layers_.back());
  }
  cast.reset();
  down_input_.reset();
  Buffer grad_up = is_gated_ ? memory_->scratch(hidden) : Buffer();
  Buffer grad_activated = is_gated_ ? memory_->scratch(hidden) : std::move(grad_down_input);
  grad_down_input.reset();
  activated_.reset();
  up_.reset();
  Buffer grad_x = needs_input_grad ? memory_->scratch(rows * dim_) : Buffer();
  if (is_gated_) {
    make_gradients(layers_[1]);
    grad_up.reset();
  }
  const Buffer grad_gate = memory_->scratch(hidden);
  grad_activated.reset();
  gate_.reset();
  const Buffer own_grad_x =
      needs_input_grad && is_gated_ ? memory_->scratch(rows * dim_) : Buffer();
  make_gradients(layers_.front());
  x_.reset();
  up_input_.reset();
  return memory_->is_autocast() && grad_x ? memory_->scratch_float32(rows * dim_) : grad_x;
}

void Mlp::make_gradients(const std::string& layer) {
  const Buffer products = memory_->gradient_products(layer);
  const auto position = std::find(layers_.begin(), layers_.end(), layer) - layers_.begin();
  weight_copies_.at(static_cast<std::size_t>(position)).reset();
  memory_->make_gradients(layer);
}

Buffer Mlp::fused_backward(int64_t rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows * hidden_;
  Buffer cast = grad_y && memory_->has_wide_residual() ? memory_->scratch(rows * dim_) : Buffer();
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
    const Buffer products = memory_->gradient_products(layers_.back());
    if (memory_->is_autocast()) {  // autograd frees them before it casts the products
      free_saved();
      down_input.reset();
      cast.reset();
    }
    memory_->make_mlp_gradients(layers_.back());
  }
  free_saved();  // autograd frees a node's saved tensors when its backward ends
  down_input.reset();
  if (is_gated_) {
    const Buffer products = memory_->gradient_products(layers_[1]);
    grad_up.reset();
    memory_->make_mlp_gradients(layers_[1]);
  }
  {
    const Buffer products = memory_->gradient_products(layers_.front());
    memory_->make_mlp_gradients(layers_.front());
  }
  memory_->add_mlp_gradients();
  x_.reset();
  return memory_->is_autocast() && grad_x ? memory_->scratch_float32(rows * dim_) : grad_x;
}

void Mlp::free_saved() {
  gate_.reset();
  up_.reset();
  weight_copies_.clear();
}

RmsNorm::RmsNorm(RankMemory& memory, std::string name, int64_t dim)
    : memory_(&memory), name_(std::move(name)), dim_(dim) {}

// In half precision, a norm normalises a float32 copy of its input, and scales the result in half
// precision.
Buffer RmsNorm::forward(int64_t rows, const Buffer& x) {
  const int64_t num = rows * dim_;
  const bool is_half = memory_->is_residual_half();
  x_ = is_half ? memory_->saved_float32(num) : x;
  { const Buffer squares = memory_->scratch_float32(num); }
  scale_ = memory_->saved_float32(rows);
  normed_ = memory_->saved_float32(num);
  if (is_half) {
    normed_ = memory_->saved(num);
  }
  // Autocast keeps the norm's weight in float32, even if other weights are split.
  return memory_->is_autocast() ? memory_->saved_float32(num) : memory_->saved_wide(num);
}

Buffer RmsNorm::backward(int64_t rows, Buffer grad_y) {
  const int64_t num = rows * dim_;
  const auto scaled = [&] {
    return memory_->is_autocast() ? memory_->scratch_float32(num) : memory_->scratch_wide(num);
  };
  Buffer grad_normed = scaled();
  {
    const Buffer product = scaled();
    memory_->make_gradients(name_);
  }
  normed_.reset();
  grad_y.reset();
  if (memory_->is_residual_half()) {
    grad_normed = memory_->scratch_float32(num);
  }
  Buffer grad_x = memory_->scratch_float32(num);
  { const Buffer product = memory_->scratch_float32(num); }
  grad_normed.reset();
  {
    const Buffer grad_squares = memory_->scratch_float32(num);
    const Buffer power = memory_->scratch_float32(num);
    const Buffer twice = memory_->scratch_float32(num);
    const Buffer grad_from_scale = memory_->scratch_float32(num);
  }
  x_.reset();
  scale_.reset();
  return memory_->is_residual_half() ? memory_->scratch(num) : grad_x;
}

Attention::Attention(RankMemory& memory, const std::string& name, const DecoderModel& model)
    : memory_(&memory),
      name_(name),
      dim_(model.dim),
      query_dim_(memory.weight_dim_size(name + ".q_proj", 0)),
      kv_dim_(memory.weight_dim_size(name + ".k_proj", 0)),
      is_summed_(memory.style(name + ".o_proj").style == Style::kRow),
      num_heads_(query_dim_ / model.head_dim) {}

// Computes x * cos + cat(-b, a) * sin, where a and b are the halves of each head of x. Under
// autocast, cos and sin are float32, so that the products are, too.
Buffer Attention::apply_rotary(int64_t num) {
  const auto product = [&] {
    return memory_->has_wide_residual() ? memory_->scratch_float32(num) : memory_->scratch(num);
  };
  const Buffer by_cos = product();
  Buffer rotated;
  {
    const Buffer negative = memory_->scratch(num / 2);
    rotated = memory_->scratch(num);
  }
  const Buffer by_sin = product();
  rotated.reset();
  return memory_->has_wide_residual() ? memory_->scratch_float32(num) : memory_->saved(num);
}

// Returns what a projection saves under autocast: a copy of its weight and one of its input.
Attention::Copies Attention::copies_of(const std::string& projection, int64_t rows) {
  Buffer weight = memory_->saved_weight_copies(name_ + projection);
  if (!memory_->is_autocast()) {
    return {.weight = std::move(weight), .input = x_};
  }
  return {.weight = std::move(weight), .input = memory_->saved(rows * dim_)};
}

Buffer Attention::forward(int64_t rows, const Buffer& x) {
  x_ = x;
  query_copies_ = copies_of(".q_proj", rows);
  Buffer query = memory_->scratch_product(rows * query_dim_);
  key_copies_ = copies_of(".k_proj", rows);
  Buffer key = memory_->scratch_product(rows * kv_dim_);
  value_copies_ = copies_of(".v_proj", rows);
  value_ = memory_->saved_product(rows * kv_dim_);
  x_.reset();  // the copies are, or hold, what the projections save
  query_ = apply_rotary(rows * query_dim_);
  key_ = apply_rotary(rows * kv_dim_);
  query.reset();
  key.reset();
  if (memory_->has_wide_residual()) {
    Buffer query_copy = memory_->saved(rows * query_dim_);
    Buffer key_copy = memory_->saved(rows * kv_dim_);
    output_ = memory_->saved_product(rows * query_dim_);
    query_ = std::move(query_copy);
    key_ = std::move(key_copy);
  } else {
    output_ = memory_->saved_product(rows * query_dim_);
  }
  logsumexp_ = memory_->product(MemoryCategory::kSavedActivations, rows * num_heads_ * 4);
  output_copies_ = {.weight = memory_->saved_weight_copies(name_ + ".o_proj"), .input = {}};
  Buffer y = memory_->scratch_product(rows * dim_);
  if (is_summed_) {
    memory_->communicate(memory_->product_bytes(rows * dim_));
  }
  return y;
}

// Allocates the gradient of a projection's input, and the gradients of its parameters.
Buffer Attention::project_back(const std::string& projection,
                               int64_t num,
                               Copies& copies,
                               Buffer& grad) {
  Buffer grad_x = memory_->scratch(num);
  const Buffer products = memory_->gradient_products(name_ + projection);
  if (memory_->is_autocast()) {  // autograd frees them before it casts the products
    grad.reset();
    copies = {};
    if (projection != ".o_proj") {
      grad_x = memory_->scratch_float32(num);
    }
  }
  memory_->make_gradients(name_ + projection);
  grad.reset();
  copies = {};
  return grad_x;
}

Buffer Attention::backward(int64_t rows, const Buffer& /*grad_y*/) {
  const int64_t query = rows * query_dim_;
  const int64_t key = rows * kv_dim_;
  Buffer cast = memory_->has_wide_residual() ? memory_->scratch(rows * dim_) : Buffer();
  Buffer grad_output = project_back(".o_proj", query, output_copies_, cast);
  Buffer grad_query = memory_->scratch(query);
  Buffer grad_key = memory_->scratch(key);
  Buffer grad_value = memory_->scratch(key);
  grad_output.reset();
  output_.reset();
  query_.reset();
  key_.reset();
  value_.reset();
  logsumexp_.reset();
  if (memory_->has_wide_residual()) {
    grad_key = memory_->scratch_float32(key);
    grad_query = memory_->scratch_float32(query);
  }
  rotate_back(key, grad_key);
  rotate_back(query, grad_query);
  // The gradients of x through the three projections are added up one by one.
  Buffer grad_x = project_back(".v_proj", rows * dim_, value_copies_, grad_value);
  for (const bool is_key : {true, false}) {
    const Buffer own_grad_x = is_key
                                  ? project_back(".k_proj", rows * dim_, key_copies_, grad_key)
                                  : project_back(".q_proj", rows * dim_, query_copies_, grad_query);
    grad_x = memory_->is_autocast() ? memory_->scratch_float32(rows * dim_)
                                    : memory_->scratch(rows * dim_);
  }
  return grad_x;
}

// Replaces the gradient of a rotated tensor by that of the tensor before.
void Attention::rotate_back(int64_t num, Buffer& grad) {
  const auto product = [&] {
    const Buffer wide = memory_->has_wide_residual() ? memory_->scratch_float32(num) : Buffer();
    return memory_->scratch(num);
  };
  Buffer rotated = product();
  Buffer joined;
  {
    const Buffer negative = memory_->scratch(num / 2);
    const Buffer by_cos = product();
    rotated.reset();
    grad = by_cos;
    joined = memory_->scratch(num);
  }
  grad = memory_->scratch(num);
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
  Buffer y = memory_->saved_wide(rows * dim_);
  if (memory_->is_residual_half()) {
    layers_.residual.reset();  // the norm saves its float32 copy
  }
  return y;
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
    Buffer grad_normed = layers_.mlp.backward(rows, grad_y, true);
    const Buffer grad_branch = layers_.mlp_norm.backward(rows, std::move(grad_normed));
    grad_residual = memory_->scratch_wide(rows * dim_);
  }
  layers_.residual.reset();
  Buffer grad_normed = layers_.attention.backward(rows, grad_residual);
  const Buffer grad_branch = layers_.attention_norm.backward(rows, std::move(grad_normed));
  x_.reset();
  random_state_.reset();
  return memory_->scratch_wide(rows * dim_);
}

}  // namespace weft::strategy::detail
