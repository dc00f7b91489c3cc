#pragma once

// What the three programs share: a place among the ranks of a job, a group, a way to print.

#include <weft/ops/backend.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

namespace example {

struct Job {
  std::string store_file;  // that no other job uses; any c10d::Store would do
  int rank;
  int size;
};

// The first three arguments of a program: STORE_FILE RANK SIZE.
inline Job job_of(char** arguments) {
  return {arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3])};
}

// All ranks of the job as a group, which the operators find under `name` while it is held.
inline c10::intrusive_ptr<c10d::ProcessGroup> make_group(const Job& job, const std::string& name) {
  const auto store = c10::make_intrusive<c10d::FileStore>(job.store_file, job.size);
  auto options = c10::make_intrusive<weft::ops::BackendOptions>();
  options->timeout = std::chrono::seconds(60);  // of a rank that does not come
  return weft::ops::make_group(name, store, job.rank, job.size, options);
}

// One line, in one write: the ranks share a terminal. Nine digits say which float32 it was.
inline void print_numbers(const Job& job, const std::string& name, const at::Tensor& numbers) {
  std::string line = "rank " + std::to_string(job.rank) + " " + name + ":";
  const at::Tensor flat = numbers.detach().to(at::kDouble).flatten();
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    char text[32];
    std::snprintf(text, sizeof text, " %.9g", flat.const_data_ptr<double>()[i]);
    line += text;
  }
  std::cout << line + "\n" << std::flush;
}

}  // namespace example
