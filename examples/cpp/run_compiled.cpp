// Runs the language model that `export_models.py --compiled` has exported and compiled, one process
// per rank:
//
//     run_compiled STORE_FILE RANK SIZE FOLDER
//
// The package calls the operators by name, so weft's library must be loaded before it runs: linking
// it is enough.
#include "job.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

void run(const example::Job& job, const std::string& folder) {
  torch::inductor::AOTIModelPackageLoader package(folder + "/language_model.rank" +
                                                  std::to_string(job.rank) + ".pt2");
  // The group's name is a constant of the compiled program; export_models.py saved it as metadata.
  const auto group = example::make_group(job, package.get_metadata().at("weft_group"));
  const c10::InferenceMode no_gradients;
  const at::Tensor tokens = (at::arange(12) * 37 % 64).view({1, 12});
  example::print_numbers(job, "logits", package.run({tokens}).at(0).select(1, -1));
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
