#include "layers.h"

#include <algorithm>
#include <utility>

namespace weft::strategy::detail {

namespace {

// The size of the state of torch's CPU generator, which an activation checkpoint saves.
constexpr int64_t kRandomStateBytes = 5056;

}  // namespace

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

Buffer Attention::forward(const Rows& rows, const Buffer& x) {
  const Buffer input =
      rows.is_sharded
          ? gather_tokens(*memory_, rows, memory_->norm_bytes(dim_), !memory_->is_autocast())
          : x;
  x_ = input;
  query_copies_ = copies_of(".q_proj", rows.all);
  Buffer query = memory_->scratch_product(rows.all * query_dim_);
  key_copies_ = copies_of(".k_proj", rows.all);
  Buffer key = memory_->scratch_product(rows.all * kv_dim_);
  value_copies_ = copies_of(".v_proj", rows.all);
  value_ = memory_->saved_product(rows.all * kv_dim_);
  x_.reset();  // the copies are, or hold, what the projections save
  query_ = apply_rotary(rows.all * query_dim_);
  key_ = apply_rotary(rows.all * kv_dim_);
  query.reset();
  key.reset();
  if (memory_->has_wide_residual()) {
    Buffer query_copy = memory_->saved(rows.all * query_dim_);
    Buffer key_copy = memory_->saved(rows.all * kv_dim_);
    output_ = memory_->saved_product(rows.all * query_dim_);
    query_ = std::move(query_copy);
    key_ = std::move(key_copy);
  } else {
    output_ = memory_->saved_product(rows.all * query_dim_);
  }
  logsumexp_ = memory_->product(MemoryCategory::kSavedActivations, rows.all * num_heads_ * 4);
  output_copies_ = {.weight = memory_->saved_weight_copies(name_ + ".o_proj"), .input = {}};
  return sum_output(*memory_, rows, dim_, is_summed_);
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

Buffer Attention::backward(const Rows& rows) {
  const int64_t query = rows.all * query_dim_;
  const int64_t key = rows.all * kv_dim_;
  Buffer cast = memory_->has_wide_residual() ? memory_->scratch(rows.own * dim_) : Buffer();
  Buffer grad_y = rows.is_sharded ? gather_inside(*memory_, rows, memory_->product_bytes(dim_))
                                  : std::move(cast);
  Buffer grad_output = project_back(".o_proj", query, output_copies_, grad_y);
  cast.reset();
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
  const int64_t num = rows.all * dim_;
  Buffer grad_x = project_back(".v_proj", num, value_copies_, grad_value);
  for (const bool is_key : {true, false}) {
    const Buffer own_grad_x = is_key ? project_back(".k_proj", num, key_copies_, grad_key)
                                     : project_back(".q_proj", num, query_copies_, grad_query);
    grad_x = memory_->is_autocast() ? memory_->scratch_float32(num) : memory_->scratch(num);
  }
  return rows.is_sharded ? scatter_tokens(*memory_, rows, memory_->norm_bytes(dim_), grad_x)
                         : grad_x;
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
             Checkpointing checkpointing,
             Position position)
    : memory_(&memory),
      dim_(model.dim),
      checkpointing_(checkpointing),
      position_(position),
      layers_(memory, model, "model.layers." + std::to_string(layer)),
      empty_(layers_) {}

Buffer Block::run(const Rows& rows, const Buffer& x, bool saves_activations) {
  // Without saves_activations, a layer's buffers are released when its forward ends.
  const auto release = [&](auto& layer, const auto& empty) {
    if (!saves_activations) {
      layer = empty;
    }
  };
  const bool scatters = rows.is_sharded && position_.is_first;
  const Buffer own_x = scatters ? memory_->saved_wide(rows.own * dim_) : x;
  {
    const Buffer normed = layers_.attention_norm.forward(rows.own, own_x);
    release(layers_.attention_norm, empty_.attention_norm);
    const Buffer attention_output = layers_.attention.forward(rows, normed);
    release(layers_.attention, empty_.attention);
    layers_.residual = memory_->saved_wide(rows.own * dim_);
  }
  const Buffer normed = layers_.mlp_norm.forward(rows.own, layers_.residual);
  release(layers_.mlp_norm, empty_.mlp_norm);
  const Buffer mlp_output = layers_.mlp.forward(rows, normed);
  release(layers_.mlp, empty_.mlp);
  Buffer y = memory_->saved_wide(rows.own * dim_);
  if (memory_->is_residual_half()) {
    layers_.residual.reset();  // the norm saves its float32 copy
  }
  return y;
}

Buffer Block::forward(const Rows& rows, const Buffer& x) {
  if (checkpointing_ == Checkpointing::kSelective) {
    memory_->begin_recording(tape_);
  }
  Buffer y = run(rows, x, checkpointing_ == Checkpointing::kNone);
  if (rows.is_sharded && position_.is_last) {
    y = gather_tokens(*memory_, rows, memory_->wide_bytes(dim_), true);
  }
  memory_->end_recording();
  if (checkpointing_ != Checkpointing::kNone) {
    layers_ = empty_;
    x_ = x;
    random_state_ = memory_->hold_bytes(MemoryCategory::kSavedActivations, kRandomStateBytes);
  }
  return y;
}

// A recomputation ends with the MLP, before tokens are gathered, so that the tape keeps the
// gathered ones.
Buffer Block::backward(const Rows& rows, Buffer grad_y) {
  if (rows.is_sharded && position_.is_last) {
    grad_y = memory_->scratch_wide(rows.own * dim_);
  }
  if (checkpointing_ != Checkpointing::kNone) {
    memory_->begin_recomputation(tape_);
    run(rows, x_, true);
    memory_->end_recomputation();
  }
  Buffer grad_residual;
  {
    Buffer grad_normed = layers_.mlp.backward(rows, grad_y, true);
    const Buffer grad_branch = layers_.mlp_norm.backward(rows.own, std::move(grad_normed));
    grad_residual = memory_->scratch_wide(rows.own * dim_);
  }
  layers_.residual.reset();
  Buffer grad_normed = layers_.attention.backward(rows);
  const Buffer grad_branch = layers_.attention_norm.backward(rows.own, std::move(grad_normed));
  x_.reset();
  random_state_.reset();
  tape_.clear();
  Buffer grad_x = memory_->scratch_wide(rows.own * dim_);
  return rows.is_sharded && position_.is_first
             ? gather_inside(*memory_, rows, memory_->wide_bytes(dim_))
             : grad_x;
}

}  // namespace weft::strategy::detail
