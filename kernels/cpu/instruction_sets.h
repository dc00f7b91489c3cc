#pragma once

#include "activation_loops_api.h"

#include <vector>

// The instruction sets that activation_loops.h is compiled for, as the running processor has them.
namespace weft::kernels::cpu {

struct InstructionSet {
  const char* name;
  void (*activation_loops)(const detail::ActivationJob& job, int64_t first, int64_t last);
};

// Those that the running processor executes, widest first; never empty.
std::vector<InstructionSet> supported_instruction_sets();

}  // namespace weft::kernels::cpu
