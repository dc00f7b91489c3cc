#pragma once

// How a failure of a group reaches the caller: as the C++ class, or as what a language above makes
// of it.

#include <weft/collectives/error.h>
#include <weft/ops/export.h>

#include <exception>
#include <string>

namespace weft::collectives {

// Throws its own exception for a failure. Called on the thread that called the operation.
using RaiseHook = void (*)(ErrorKind kind, const std::string& text);

// For all failures from now on; null: the C++ classes.
WEFT_OPS_API void set_raise_hook(RaiseHook hook);

// `error` as the caller is to get it.
std::exception_ptr translated(std::exception_ptr error);
[[noreturn]] void raise(std::exception_ptr error);

}  // namespace weft::collectives
