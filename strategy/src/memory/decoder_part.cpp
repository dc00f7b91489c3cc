#include "decoder_part.h"

#include <utility>

namespace weft::strategy::detail {

namespace {

constexpr int64_t kTokenIdBytes = 8;  // int64

}  // namespace

DecoderPart::DecoderPart(RankMemory& memory,
                         const DecoderModel& model,
                         const StageLayers& stage,
                         const TrainingSpec& spec,
                         int64_t num_sequences)
    : memory_(memory),
      model_(model),
      stage_(stage),
      norm_(memory, "model.norm", model.dim),
      rows_(rows_of(spec, num_sequences, memory.tp_rank())) {
  const std::vector<bool> is_checkpointed = checkpointed_blocks(model, spec);
  for (int64_t block = stage.first_block; block < stage.last_block; ++block) {
    const bool is_own = is_checkpointed[static_cast<std::size_t>(block)];
    blocks_.emplace_back(memory,
                         model,
                         block,
                         is_own ? spec.checkpointing : Checkpointing::kNone,
                         Block::Position{.is_first = block == stage.first_block,
                                         .is_last = block + 1 == stage.last_block});
  }
  has_embedding_sum_ = memory.style("model.embed_tokens").style == Style::kVocabEmbedding;
  if (stage.has_head) {
    own_vocabulary_ = memory.weight_dim_size(head(), 0);
    gathers_logits_ = memory.style("lm_head").style == Style::kColumnGatherOutput &&
                      own_vocabulary_ < model.vocab_size;
    vocabulary_ = gathers_logits_ ? model.vocab_size : own_vocabulary_;
  }
}

Buffer DecoderPart::forward(Buffer x) {
  if (stage_.has_embedding) {
    if (is_full_model()) {
      memory_.unshard(0);
    }
    x = memory_.saved_wide(rows_.all * model_.dim);
    if (has_embedding_sum_) {
      memory_.communicate(memory_.wide_bytes(rows_.all * model_.dim));
    }
  }
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (is_full_model()) {
      memory_.unshard(unit_of(i));
    }
    x = blocks_[i].forward(rows_, x);
    if (is_full_model() && memory_.reshards_after_forward() && i + 1 < blocks_.size()) {
      memory_.reshard(unit_of(i));  // the backward begins with the last unit
    }
  }
  if (!stage_.has_head) {
    return x;
  }
  head_forward(std::move(x));
  return {};
}

void DecoderPart::head_forward(Buffer x) {
  const Buffer normed = norm_.forward(rows_.all, x);
  x.reset();
  head_copies_ = memory_.saved_weight_copies(head());
  normed_ = memory_.saved_input(rows_.all * model_.dim, normed);
  const Buffer logits = logits_forward();
  targets_ = memory_.hold_bytes(MemoryCategory::kSavedActivations, rows_.all * kTokenIdBytes);
  const Buffer cast = memory_.casts_loss() ? loss_sized() : Buffer();
  log_probabilities_ = memory_.casts_loss() ? memory_.saved_float32(rows_.all * vocabulary_)
                                            : memory_.saved(rows_.all * vocabulary_);
}

Buffer DecoderPart::backward(Buffer grad) {
  if (stage_.has_head) {
    grad = head_backward();
  }
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    if (is_full_model()) {
      memory_.unshard(unit_of(i));
      if (i > 0 && memory_.prefetches()) {
        memory_.unshard(unit_of(i - 1));
      }
    }
    grad = blocks_[i].backward(rows_, std::move(grad));
    if (is_full_model()) {
      memory_.reduce_gradients(unit_of(i));
    }
  }
  if (stage_.has_embedding) {
    memory_.make_gradients("model.embed_tokens");
    tied_gradient_.reset();
    if (is_full_model()) {
      memory_.reduce_gradients(0);
    }
    grad.reset();
  }
  return grad;
}

Buffer DecoderPart::head_backward() {
  Buffer grad_logits;
  {
    const Buffer grad = loss_sized();
    targets_.reset();
    grad_logits = loss_sized();
  }
  log_probabilities_.reset();
  if (memory_.casts_loss()) {
    grad_logits = memory_.scratch(rows_.all * vocabulary_);
  }
  if (gathers_logits_) {
    grad_logits = memory_.scratch(rows_.all * own_vocabulary_);
  }
  Buffer grad = memory_.scratch(rows_.all * model_.dim);
  if (gathers_logits_) {
    memory_.communicate(memory_.product_bytes(rows_.all * model_.dim));
  }
  {
    const Buffer products = memory_.gradient_products(head());
    if (memory_.is_autocast()) {  // autograd frees them before it casts the products
      grad_logits.reset();
      normed_.reset();
      head_copies_.reset();
      grad = memory_.scratch_float32(rows_.all * model_.dim);
    }
    if (is_tied_here()) {
      tied_gradient_ = memory_.weight_sized("model.embed_tokens");
    } else {
      memory_.make_gradients(head());
    }
  }
  grad_logits.reset();
  normed_.reset();
  return norm_.backward(rows_.all, std::move(grad));
}

// The cross-entropy computes in float32, on a copy of logits in half precision.
Buffer DecoderPart::loss_sized() {
  return memory_.casts_loss() ? memory_.scratch_float32(rows_.all * vocabulary_)
                              : memory_.scratch(rows_.all * vocabulary_);
}

// The all-gather orders logits by rank; a copy then orders them by class.
Buffer DecoderPart::logits_forward() {
  Buffer logits_shard = memory_.scratch(rows_.all * own_vocabulary_);
  if (!gathers_logits_) {
    return logits_shard;
  }
  memory_.communicate_once(memory_.product_bytes(rows_.all * own_vocabulary_));
  const Buffer by_rank = memory_.scratch(rows_.all * vocabulary_);
  return memory_.scratch(rows_.all * vocabulary_);
}

}  // namespace weft::strategy::detail
