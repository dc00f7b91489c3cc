#pragma once

// Modules that were scripted in Python, for the C++ programs that load them (torch::jit::load). The
// operators must be there before: a program that links libweft_ops.so has them.

#include <weft/ops/export.h>

#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <string>

namespace weft::ops {

// Sets `group_name` on every weft module inside `module`, as weft.nn.rebind_group does in Python:
// the name of a registered group of this process (weft::ops::make_group), or "" for a group of one.
// Returns how many there were. Errors: c10::ValueError where there is none; in a frozen module the
// names are constants.
WEFT_OPS_API std::int64_t rebind_group(const torch::jit::Module& module,
                                       const std::string& group_name);

}  // namespace weft::ops
