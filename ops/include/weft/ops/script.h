#pragma once

// Support for C++ programs that load modules scripted in Python (torch::jit::load). A program that
// links libweft_ops.so and calls any of its functions, such as rebind_group, has the operators
// registered.

#include <weft/ops/export.h>

#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <string>

namespace weft::ops {

// Sets `group_name` on every weft module inside `module`, as weft.nn.rebind_group does in Python:
// the name of a registered group of this process (weft::ops::make_group), or "" for a group of one.
// Returns the number of weft modules. Errors: c10::ValueError if there are none, as in a frozen
// module, where the names are constants.
WEFT_OPS_API std::int64_t rebind_group(const torch::jit::Module& module,
                                       const std::string& group_name);

}  // namespace weft::ops
