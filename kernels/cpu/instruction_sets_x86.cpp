#include "instruction_sets.h"

namespace weft::kernels::cpu {

// Keep in step with the options of loops_avx2.cpp and loops_avx512.cpp in kernels/CMakeLists.txt.
std::vector<InstructionSet> supported_instruction_sets() {
  __builtin_cpu_init();
  std::vector<InstructionSet> sets;
  const bool has_fma = __builtin_cpu_supports("fma") != 0;
  if (has_fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back({"avx512", loops_avx512()});
  }
  if (has_fma && __builtin_cpu_supports("avx2")) sets.push_back({"avx2", loops_avx2()});
  sets.push_back({"baseline", loops_baseline()});
  return sets;
}

}  // namespace weft::kernels::cpu
