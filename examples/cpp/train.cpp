// Trains a small language model that is built from weft's operators, with libtorch's SGD, one
// process per rank; then the same model unsharded:
//
//     train STORE_FILE RANK SIZE
//
// Embedding and output are sharded by rows, the feed-forward by its hidden dim. Prints the losses
// of both, and fails if they differ.
//
// Shapes: N tokens, V in the vocabulary, D model dim, F hidden dim; v and f on this rank.
#include "job.h"

#include <weft/ops/operators.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kVocab = 50, kDim = 16, kHidden = 40, kNumTokens = 64, kNumSteps = 20;
constexpr double kLearningRate = 0.5;
constexpr double kTolerance = 1e-10;  // float64: only the order of the additions differs

struct Model {
  at::Tensor embedding;  // [v, D]
  at::Tensor w1, w3;     // [f, D]
  at::Tensor w2;         // [D, f]
  at::Tensor output;     // [v, D]
  std::int64_t vocab_start = 0;
  std::string group_name;  // "": unsharded

  std::vector<at::Tensor> parameters() const { return {embedding, w1, w3, w2, output}; }
};

// Returns the unsharded model, which is the same on every rank: all use the same seed.
Model full_model() {
  at::manual_seed(0);
  const auto normal = [](std::int64_t rows, std::int64_t columns) {
    return at::randn({rows, columns}, at::kDouble) / std::sqrt(static_cast<double>(columns));
  };
  Model model;
  model.embedding = normal(kVocab, kDim) * 4;
  model.w1 = normal(kHidden, kDim);
  model.w3 = normal(kHidden, kDim);
  model.w2 = normal(kDim, kHidden);
  model.output = normal(kVocab, kDim);
  return model;
}

// Returns this rank's torch.chunk shard: ceil(size / ranks) entries, later shards shorter or empty.
at::Tensor shard_of(const at::Tensor& full, std::int64_t dim, const example::Job& job) {
  const std::int64_t size = full.size(dim);
  const std::int64_t longest = (size + job.size - 1) / job.size;
  const std::int64_t start = std::min(job.rank * longest, size);
  const std::int64_t end = std::min(start + longest, size);
  return full.slice(dim, start, end).clone(at::MemoryFormat::Contiguous);
}

Model sharded(const Model& full, const example::Job& job, const std::string& group_name) {
  const std::int64_t longest = (kVocab + job.size - 1) / job.size;
  return {.embedding = shard_of(full.embedding, 0, job),
          .w1 = shard_of(full.w1, 0, job),
          .w3 = shard_of(full.w3, 0, job),
          .w2 = shard_of(full.w2, 1, job),
          .output = shard_of(full.output, 0, job),
          .vocab_start = std::min(job.rank * longest, kVocab),
          .group_name = group_name};
}

at::Tensor loss_of(const Model& model, const at::Tensor& tokens, const at::Tensor& targets) {
  const at::Tensor x = weft::ops::vocab_parallel_embedding(
      tokens, model.embedding, model.vocab_start, model.group_name, kVocab);
  const weft::ops::ColumnRowMlpWeights weights{.w1 = model.w1, .w2 = model.w2, .w3 = model.w3};
  const at::Tensor hidden =
      x + weft::ops::column_row_mlp(x, weights, /*activation=*/"silu", model.group_name);
  return weft::ops::vocab_parallel_linear_cross_entropy(
      hidden, model.output, targets, model.vocab_start, model.group_name, {.vocab_size = kVocab});
}

// Returns the loss before each step.
at::Tensor train(const Model& model) {
  std::vector<at::Tensor> parameters = model.parameters();
  for (at::Tensor& parameter : parameters) {
    parameter.requires_grad_();
  }
  torch::optim::SGD optimizer(parameters, kLearningRate);
  // The target of a token is the one that is three further in the vocabulary.
  const at::Tensor tokens = at::arange(kNumTokens) * 7 % kVocab;
  const at::Tensor targets = (tokens + 3) % kVocab;
  at::Tensor losses = at::empty({kNumSteps}, at::kDouble);
  for (std::int64_t step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model, tokens, targets);
    loss.backward();
    optimizer.step();
    losses.select(0, step).copy_(loss.detach());
  }
  return losses;
}

bool run(const example::Job& job) {
  const auto group = example::make_group(job, "job");
  const at::Tensor losses = train(sharded(full_model(), job, "job"));
  const at::Tensor full_losses = train(full_model());
  example::print_numbers(job, "sharded", losses);
  example::print_numbers(job, "unsharded", full_losses);
  const double difference = (losses - full_losses).abs().max().item<double>();
  if (!(difference <= kTolerance)) {
    std::cerr << "rank " << job.rank << ": the losses differ by " << difference << "\n";
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: " << argv[0] << " STORE_FILE RANK SIZE\n";
    return 2;
  }
  try {
    return run(example::job_of(argv)) ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
