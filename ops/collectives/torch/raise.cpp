#include "raise.h"

#include <atomic>
#include <utility>

namespace weft::collectives {

namespace {

std::atomic<RaiseHook> raise_hook{nullptr};

}  // namespace

void set_raise_hook(RaiseHook hook) { raise_hook.store(hook); }

void raise(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const CollectiveError& failure) {
    if (const RaiseHook hook = raise_hook.load()) hook(failure.kind(), failure.what());
    throw;
  }
}

std::exception_ptr translated(std::exception_ptr error) {
  if (error == nullptr) return nullptr;
  try {
    raise(std::move(error));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace weft::collectives
