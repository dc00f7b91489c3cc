#include "layers.h"

#include <algorithm>
#include <utility>

namespace weft::strategy::detail {

Mlp::Mlp(RankMemory& memory, std::vector<std::string> layers)
    : memory_(&memory),
      layers_(std::move(layers)),
      is_gated_(layers_.size() == 3),
      recompute_(memory.style(layers_.front()).recompute),
      is_fused_(memory.style(layers_.front()).is_fused),
      is_summed_(memory.style(layers_.back()).style == Style::kRow),
      dim_(memory.weight_dim_size(layers_.front(), 1)),
      hidden_(memory.weight_dim_size(layers_.front(), 0)) {}

Buffer Mlp::forward(const Rows& rows, const Buffer& x) {
  const int64_t hidden = rows.all * hidden_;
  weight_copies_.clear();
  for (const std::string& layer : layers_) {
    weight_copies_.push_back(memory_->saved_weight_copies(layer));
  }
  // Separate layers save all tokens, which are gathered before them; a fused operator saves its
  // shard.
  const bool gathers_before = rows.is_sharded && !is_fused_;
  const Buffer input =
      gathers_before
          ? gather_tokens(*memory_, rows, memory_->norm_bytes(dim_), !memory_->is_autocast())
          : x;
  const int64_t num_saved = (gathers_before ? rows.all : rows.own) * dim_;
  x_ = memory_->saved_input(num_saved, input);
  if (!is_fused_ && is_gated_) {
    up_input_ = memory_->saved_input(num_saved, input);
  }
  const auto hidden_product = [&] {
    return recompute_ ? memory_->scratch_product(hidden) : memory_->saved_product(hidden);
  };
  const bool gathers_inside = rows.is_sharded && is_fused_ && !memory_->reuses_products();
  Buffer gathered =
      gathers_inside ? gather_inside(*memory_, rows, memory_->product_bytes(dim_)) : Buffer();
  Buffer gate = hidden_product();
  Buffer up = is_gated_ ? hidden_product() : Buffer();
  gathered.reset();
  Buffer down_input = is_fused_ ? memory_->scratch(hidden) : memory_->saved(hidden);
  if (!is_fused_) {
    activated_ = is_gated_ ? memory_->saved(hidden) : Buffer();
    down_input_ = std::move(down_input);
  }
  Buffer y = sum_output(*memory_, rows, dim_, is_summed_);
  if (!recompute_) {
    gate_ = std::move(gate);
    up_ = std::move(up);
  }
  return y;
}

Buffer Mlp::backward(const Rows& rows, const Buffer& grad_y, bool needs_input_grad) {
  return is_fused_ ? fused_backward(rows, grad_y, needs_input_grad)
                   : layered_backward(rows, grad_y, needs_input_grad);
}

// Follows torch's autograd through linear layers, an activation and a product.
Buffer Mlp::layered_backward(const Rows& rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows.all * hidden_;
  const int64_t num = rows.all * dim_;
  Buffer cast =
      grad_y && memory_->has_wide_residual() ? memory_->scratch(rows.own * dim_) : Buffer();
  Buffer full_grad_y = gather_gradient(rows);
  Buffer grad_down_input = memory_->scratch(hidden);
  {
    const Buffer expanded = grad_y || rows.is_sharded ? Buffer() : memory_->scratch(num);
    make_gradients(layers_.back());
  }
  cast.reset();
  full_grad_y.reset();
  down_input_.reset();
  Buffer grad_up = is_gated_ ? memory_->scratch(hidden) : Buffer();
  Buffer grad_activated = is_gated_ ? memory_->scratch(hidden) : std::move(grad_down_input);
  grad_down_input.reset();
  activated_.reset();
  up_.reset();
  Buffer grad_x = needs_input_grad ? memory_->scratch(num) : Buffer();
  if (is_gated_) {
    make_gradients(layers_[1]);
    grad_up.reset();
  }
  const Buffer grad_gate = memory_->scratch(hidden);
  grad_activated.reset();
  gate_.reset();
  const Buffer own_grad_x = needs_input_grad && is_gated_ ? memory_->scratch(num) : Buffer();
  make_gradients(layers_.front());
  x_.reset();
  up_input_.reset();
  if (memory_->is_autocast() && grad_x) {
    grad_x = memory_->scratch_float32(num);
  }
  return rows.is_sharded ? scatter_tokens(*memory_, rows, memory_->norm_bytes(dim_), grad_x)
                         : grad_x;
}

// Returns the gradient of the output for all tokens; empty if the caller's has them.
Buffer Mlp::gather_gradient(const Rows& rows) {
  return rows.is_sharded ? gather_inside(*memory_, rows, memory_->product_bytes(dim_)) : Buffer();
}

void Mlp::make_gradients(const std::string& layer) {
  const Buffer products = memory_->gradient_products(layer);
  const auto position = std::find(layers_.begin(), layers_.end(), layer) - layers_.begin();
  weight_copies_.at(static_cast<std::size_t>(position)).reset();
  memory_->make_gradients(layer);
}

// With a sharded sequence, x is gathered again while the gradients of the hidden features are
// computed, and the gradient of x is reduce-scattered while those of the weights are.
Buffer Mlp::fused_backward(const Rows& rows, const Buffer& grad_y, bool needs_input_grad) {
  const int64_t hidden = rows.all * hidden_;
  const int64_t row_bytes = memory_->product_bytes(dim_);
  Buffer cast =
      grad_y && memory_->has_wide_residual() ? memory_->scratch(rows.own * dim_) : Buffer();
  Buffer full_grad_y = gather_gradient(rows);
  Buffer full_x = rows.is_sharded ? start_gather(*memory_, rows, row_bytes) : Buffer();
  if (recompute_) {
    full_x = rows.is_sharded ? finish_gather(*memory_, rows, row_bytes, full_x) : Buffer();
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
  Buffer grad_x = needs_input_grad ? memory_->scratch(rows.all * dim_) : Buffer();
  Buffer sent;  // until the reduce-scatter has ended
  if (rows.is_sharded) {
    sent = sent_tokens(*memory_, rows, row_bytes, grad_x);
    memory_->communicate_shards(rows.largest * row_bytes);
    grad_x = memory_->scratch(rows.largest * dim_);
  }
  {
    // The gradient of a sum is a scalar, expanded to a matrix for the matrix product.
    const int64_t features = memory_->rows_at_once(layers_.back());
    const bool is_scalar = !grad_y && !rows.is_sharded;
    const Buffer expanded = is_scalar ? memory_->scratch(rows.all * features) : Buffer();
    const Buffer products = memory_->gradient_products(layers_.back());
    if (memory_->is_autocast()) {  // autograd frees them before it casts the products
      free_saved();
      down_input.reset();
      cast.reset();
      full_grad_y.reset();
    }
    memory_->make_mlp_gradients(layers_.back());
  }
  free_saved();  // autograd frees a node's saved tensors when its backward ends
  down_input.reset();
  full_grad_y.reset();
  if (rows.is_sharded) {
    x_.reset();
    full_x = recompute_ ? full_x : finish_gather(*memory_, rows, row_bytes, full_x);
  }
  if (is_gated_) {
    const Buffer products = memory_->gradient_products(layers_[1]);
    grad_up.reset();
    memory_->make_mlp_gradients(layers_[1]);
  }
  {
    const Buffer products = memory_->gradient_products(layers_.front());
    if (memory_->is_autocast()) {
      full_x.reset();
    }
    memory_->make_mlp_gradients(layers_.front());
  }
  memory_->add_mlp_gradients();
  x_.reset();
  sent.reset();
  return memory_->is_autocast() && grad_x ? memory_->scratch_float32(rows.own * dim_) : grad_x;
}

void Mlp::free_saved() {
  gate_.reset();
  up_.reset();
  weight_copies_.clear();
}

}  // namespace weft::strategy::detail
