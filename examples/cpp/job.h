#pragma once

// Shared by the three programs: a job's ranks, its group, and printing.

#include <weft/ops/backend.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

namespace example {

// The job, and this process's rank in it.
struct Job {
  std::string store_file;  // must not be used by another job; any c10d::Store would do
  int rank;
  int size;
};

// Parses the first three arguments of a program: STORE_FILE RANK SIZE.
inline Job job_of(char** arguments) {
  return {arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3])};
}

// Returns the group of all ranks of the job; operators find it by `name` while it exists.
inline c10::intrusive_ptr<c10d::ProcessGroup> make_group(const Job& job, const std::string& name) {
  const auto store = c10::make_intrusive<c10d::FileStore>(job.store_file, job.size);
  auto options = c10::make_intrusive<weft::ops::BackendOptions>();
  options->timeout = std::chrono::seconds(60);  // for creating the group, and for each collective
  return weft::ops::make_group(name, store, job.rank, job.size, options);
}

// Prints a line in one write, because the ranks share a terminal. Nine digits identify a float32.
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
