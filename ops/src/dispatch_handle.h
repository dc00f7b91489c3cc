#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace weft::ops::dispatch {

// The typed handle of the operator `name`, "weft::...", which each caller looks up once.
template <typename Function>
auto handle(const char* name, Function* /*signature*/) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace weft::ops::dispatch
