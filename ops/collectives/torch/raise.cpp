#include "raise.h"

#include <c10/util/StringUtil.h>

#include <atomic>
#include <utility>

namespace weft::collectives {

namespace {

std::atomic<decltype(ErrorHooks::raise)> raise_hook{nullptr};
std::atomic<decltype(ErrorHooks::make_storable)> storable_hook{nullptr};

// The innermost context of this thread, or null.
thread_local const RaiseContext* raise_context = nullptr;

std::string with_context(const char* text) {
  return raise_context == nullptr ? text : raise_context->text() + ": " + text;
}

}  // namespace

RaiseContext::RaiseContext(std::string_view op, std::string_view what, int rank)
    : op_(op), what_(what), rank_(rank), outer_(std::exchange(raise_context, this)) {}

RaiseContext::~RaiseContext() { raise_context = outer_; }

std::string RaiseContext::text() const {
  return c10::str(op_, ": the ", what_, " failed on rank ", rank_, " of its group");
}

void set_error_hooks(const ErrorHooks& hooks) {
  raise_hook.store(hooks.raise);
  storable_hook.store(hooks.make_storable);
}

void raise(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const CollectiveError& failure) {
    if (const auto hook = raise_hook.load()) hook(failure.kind(), with_context(failure.what()));
    throw;
  }
}

std::exception_ptr make_storable(std::exception_ptr error) {
  if (error == nullptr) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveError& failure) {
    const auto hook = storable_hook.load();
    return hook ? hook(failure.kind(), failure.what()) : error;
  } catch (...) {
    return error;
  }
}

}  // namespace weft::collectives
