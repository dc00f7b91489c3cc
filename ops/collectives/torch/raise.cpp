#include "raise.h"

#include <atomic>
#include <utility>

namespace weft::collectives {

namespace {

std::atomic<decltype(ErrorHooks::raise)> raise_hook{nullptr};
std::atomic<decltype(ErrorHooks::keep)> keep_hook{nullptr};

}  // namespace

void set_error_hooks(const ErrorHooks& hooks) {
  raise_hook.store(hooks.raise);
  keep_hook.store(hooks.keep);
}

void raise(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const CollectiveError& failure) {
    if (const auto hook = raise_hook.load()) hook(failure.kind(), failure.what());
    throw;
  }
}

std::exception_ptr kept(std::exception_ptr error) {
  if (error == nullptr) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveError& failure) {
    const auto hook = keep_hook.load();
    return hook ? hook(failure.kind(), failure.what()) : error;
  } catch (...) {
    return error;
  }
}

}  // namespace weft::collectives
