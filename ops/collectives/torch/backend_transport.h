#pragma once

#include "transport.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

namespace weft::collectives {

// Returns a transport that uses the send and recv of another backend with the same ranks.
std::unique_ptr<Transport> transport_over(c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace weft::collectives
