#include "raise.h"

#include <atomic>
#include <utility>

namespace weft::collectives {

namespace {

std::atomic<decltype(ErrorHooks::raise)> raise_hook{nullptr};
std::atomic<decltype(ErrorHooks::keep)> keep_hook{nullptr};

// What is being done on this thread; empty, or with ": " at its end.
thread_local std::string raise_context;

}  // namespace

RaiseContext::RaiseContext(std::string text)
    : outer_(std::exchange(raise_context, std::move(text.append(": ")))) {}

RaiseContext::~RaiseContext() { raise_context = std::move(outer_); }

void set_error_hooks(const ErrorHooks& hooks) {
  raise_hook.store(hooks.raise);
  keep_hook.store(hooks.keep);
}

void raise(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const CollectiveError& failure) {
    if (const auto hook = raise_hook.load()) hook(failure.kind(), raise_context + failure.what());
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
