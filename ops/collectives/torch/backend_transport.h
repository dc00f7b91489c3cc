#pragma once

#include "transport.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

namespace weft::collectives {

// Messages between hosts over the send and recv of another backend, of the same ranks.
std::unique_ptr<Transport> transport_over(c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace weft::collectives
