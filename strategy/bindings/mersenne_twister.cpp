// cpu_generator_after: <weft/strategy/mersenne_twister.h> on the state of a torch.Generator.
#include "weft/strategy/mersenne_twister.h"

#include "mersenne_twister.h"

#include <cstring>
#include <string>

namespace weft::strategy {

namespace py = pybind11;

namespace {

// The state's layout, of CPUGeneratorImplState in ATen/CPUGeneratorImpl.cpp, up to the words. After
// them there are cached normal numbers.
struct GeneratorState {
  uint64_t seed;
  int32_t left;
  int32_t is_seeded;
  uint64_t next;
  std::array<uint64_t, MersenneTwister::kNumWords> words;
};
constexpr size_t kStateBytes = 5056;

py::bytes cpu_generator_after(const std::string& state, uint64_t count) {
  if (state.size() != kStateBytes) {
    throw py::value_error("cpu_generator_after got a state of " + std::to_string(state.size()) +
                          " bytes; pass that of a CPU generator, of 5056 bytes.");
  }
  GeneratorState layout{};
  std::memcpy(&layout, state.data(), sizeof(layout));
  if (layout.left < 1 || layout.left > MersenneTwister::kNumWords)
    throw py::value_error("cpu_generator_after got a state of another layout; draw the numbers.");
  MersenneTwister twister{{}, layout.left, static_cast<uint32_t>(layout.next)};
  for (size_t i = 0; i < layout.words.size(); ++i)
    twister.words[i] = static_cast<uint32_t>(layout.words[i]);
  advance(twister, count);
  for (size_t i = 0; i < layout.words.size(); ++i) layout.words[i] = twister.words[i];
  layout.left = twister.left;
  layout.next = twister.next;
  std::string result = state;
  std::memcpy(result.data(), &layout, sizeof(layout));
  return result;
}

}  // namespace

void bind_mersenne_twister(py::module_& module) {
  module.def("cpu_generator_after", &cpu_generator_after, py::arg("state"), py::arg("count"));
}

}  // namespace weft::strategy
