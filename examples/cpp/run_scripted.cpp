// Runs the models that export_models.py has saved, one process per rank, without Python:
//
//     run_scripted STORE_FILE RANK SIZE FOLDER
#include "job.h"

#include <weft/ops/script.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/serialization/import.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

torch::jit::Module load(const std::string& folder,
                        const std::string& name,
                        const example::Job& job) {
  torch::jit::Module module =
      torch::jit::load(folder + "/" + name + ".rank" + std::to_string(job.rank) + ".pt");
  weft::ops::rebind_group(module, "job");  // it was saved with the name of the exporter's group
  return module;
}

at::Tensor call(torch::jit::Module& module, const at::Tensor& input) {
  return module.forward({input}).toTensor();
}

void run(const example::Job& job, const std::string& folder) {
  const auto group = example::make_group(job, "job");
  const c10::InferenceMode no_gradients;

  torch::jit::Module mlp = load(folder, "mlp", job);
  example::print_numbers(job, "mlp", call(mlp, at::linspace(-1, 1, 2 * 8).view({2, 8})));

  torch::jit::Module model = load(folder, "language_model", job);
  at::Tensor tokens = (at::arange(12) * 37 % 64).view({1, 12});
  example::print_numbers(job, "logits", call(model, tokens).select(1, -1));
  // Greedy decoding of eight tokens.
  for (int i = 0; i < 8; ++i) {
    const at::Tensor next = call(model, tokens).select(1, -1).argmax(-1, /*keepdim=*/true);
    tokens = at::cat({tokens, next}, 1);
  }
  example::print_numbers(job, "continuation", tokens.slice(1, -8));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: " << argv[0] << " STORE_FILE RANK SIZE FOLDER\n";
    return 2;
  }
  try {
    run(example::job_of(argv), argv[4]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
