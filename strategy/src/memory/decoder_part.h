#pragma once

#include "layers.h"

#include <cstdint>
#include <vector>

namespace weft::strategy::detail {

// The memory of one forward, and its backward, of the layers of a stage. The loss is the
// cross-entropy of the next tokens.
class DecoderPart {
 public:
  // `num_sequences`: of the micro-batch.
  DecoderPart(RankMemory& memory,
              const DecoderModel& model,
              const StageLayers& stage,
              const TrainingSpec& spec,
              int64_t num_sequences);

  // Takes the output of the previous stage, which is empty on the first one, and returns the
  // output, which is empty on the last one. Without a pipeline, FSDP2 gathers and frees the units.
  Buffer forward(Buffer x);
  // Takes the gradient of the output, and returns that of the input, likewise.
  Buffer backward(Buffer grad);

 private:
  [[nodiscard]] const char* head() const {
    return model_.is_tied ? "model.embed_tokens" : "lm_head";
  }
  // Whether this is the full model, whose units FSDP2 gathers and reduces one by one; a pipeline
  // does so for all units of a stage.
  [[nodiscard]] bool is_full_model() const { return stage_.has_embedding && stage_.has_head; }
  [[nodiscard]] bool is_tied_here() const { return model_.is_tied && stage_.has_embedding; }
  [[nodiscard]] int64_t unit_of(std::size_t idx) const {
    return stage_.first_block + static_cast<int64_t>(idx) + 1;
  }

  void head_forward(Buffer x);
  Buffer head_backward();
  Buffer loss_sized();
  Buffer logits_forward();

  RankMemory& memory_;
  DecoderModel model_;
  StageLayers stage_;
  std::vector<Block> blocks_;
  RmsNorm norm_;
  Rows rows_;
  int64_t vocabulary_ = 0;      // the number of logits of a token in this rank's loss
  int64_t own_vocabulary_ = 0;  // the number of logits of a token that this rank computes
  bool has_embedding_sum_ = false;
  bool gathers_logits_ = false;
  Buffer normed_, head_copies_, log_probabilities_, targets_, tied_gradient_;
};

}  // namespace weft::strategy::detail
