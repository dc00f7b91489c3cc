// NCCL between processes of one host, on the runtime without a device: the functions that torch's
// process group calls; those that need a device return an error.
//
// As in NCCL, a call only adds work to its stream; calls on one communicator run in the order in
// which they were made, whatever their streams; the calls of a group on one communicator start
// together; and a send ends no earlier than its receive begins. Unlike NCCL, it compares the
// calls of the ranks: a mismatch is an error, not a hang. Reductions add in the order of ranks.

#include "nccl_reduce.h"
#include "nccl_wire.h"
#include "runtime.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace weft::cuda_runtime {
namespace {

// The values of nccl.h.
enum Result { kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6 };
struct Communicator {
  Communicator(const std::string& name, int own_rank, int size)
      : id(name), rank(own_rank), num_ranks(size), wire(name, own_rank, size) {}

  const std::string id;
  const int rank;
  const int num_ranks;
  const int device = current_device();
  Wire wire;
  std::mutex mutex;
  cudaEvent_t last = nullptr;  // recorded after the last call
  int num_splits = 0;
};

// The transfers of one call on a communicator, and the function that runs after them.
struct Step {
  std::vector<Transfer> sent = {};
  std::vector<Transfer> received = {};
  std::function<void()> then = {};
};

struct Call {
  std::shared_ptr<Communicator> communicator;
  cudaStream_t stream;
  bool is_point_to_point;
  std::function<Step()> begin;  // when the work runs
};

thread_local int group_depth = 0;
thread_local std::vector<Call> group;

// The handle that torch owns. A call in flight shares the ownership of the communicator.
using Handle = std::shared_ptr<Communicator>;
Handle& handle_of(void* comm) { return *static_cast<Handle*>(comm); }

// Runs calls of one communicator in order; sends and receives that follow each other run at the
// same time.
void run_calls(const std::vector<Call>& calls) {
  for (std::size_t i = 0; i < calls.size();) {
    std::vector<Step> steps{calls[i].begin()};
    std::size_t end = i + 1;
    while (calls[i].is_point_to_point && end < calls.size() && calls[end].is_point_to_point) {
      steps.push_back(calls[end++].begin());
    }
    std::vector<Transfer> sent, received;
    for (const Step& step : steps) {
      sent.insert(sent.end(), step.sent.begin(), step.sent.end());
      received.insert(received.end(), step.received.begin(), step.received.end());
    }
    calls[i].communicator->wire.exchange(sent, received);
    for (const Step& step : steps) {
      if (step.then) step.then();
    }
    i = end;
  }
}

// Makes a stream wait for all work that another stream has at this moment.
void wait_for_now(cudaStream_t waiting, cudaStream_t awaited) {
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventRecord(event, awaited);
  cudaStreamWaitEvent(waiting, event, 0);
  cudaEventDestroy(event);
}

// Calls of a group may be on several streams. They run on the first of these streams, after the
// work of all of them, and all of them wait for the calls.
void submit_calls(const std::vector<Call>& calls) {
  const Handle& communicator = calls.front().communicator;
  const cudaStream_t stream = calls.front().stream;
  std::set<cudaStream_t> others;
  for (const Call& call : calls) others.insert(call.stream);
  others.erase(stream);
  const std::lock_guard lock(communicator->mutex);
  if (communicator->last == nullptr) {
    cudaEventCreateWithFlags(&communicator->last, cudaEventDisableTiming);
  } else if (!is_captured(stream)) {
    cudaStreamWaitEvent(stream, communicator->last, 0);
  }
  for (const cudaStream_t other : others) wait_for_now(stream, other);
  submit(stream, [calls] {
    try {
      run_calls(calls);
    } catch (const Aborted&) {  // NOLINT(bugprone-empty-catch): the caller aborted it
    }
  });
  if (!is_captured(stream)) cudaEventRecord(communicator->last, stream);
  for (const cudaStream_t other : others) wait_for_now(other, stream);
}

int end_group() {
  if (--group_depth > 0) return kSuccess;
  std::vector<Call> calls;
  calls.swap(group);
  std::vector<std::vector<Call>> parts;  // one for each communicator, in order of their first call
  for (Call& call : calls) {
    const auto same = std::find_if(parts.begin(), parts.end(), [&](const auto& part) {
      return part.front().communicator == call.communicator;
    });
    if (same == parts.end()) {
      parts.push_back({std::move(call)});
    } else {
      same->push_back(std::move(call));
    }
  }
  for (const auto& part : parts) submit_calls(part);
  return kSuccess;
}

int add(void* comm, void* stream, bool is_point_to_point, std::function<Step()> begin) {
  ++group_depth;
  group.push_back(
      {handle_of(comm), static_cast<cudaStream_t>(stream), is_point_to_point, std::move(begin)});
  return end_group();
}

// Sends `input` to all other ranks, and calls `use` with the inputs of all ranks.
int with_all_inputs(void* comm,
                    void* stream,
                    const std::string& name,
                    const void* input,
                    std::size_t num_bytes,
                    std::function<void(const std::vector<const void*>&)> use) {
  count("nccl " + name);
  Communicator* own = handle_of(comm).get();
  return add(comm, stream, false, [=] {
    Step step;
    auto buffers = std::make_shared<std::vector<std::vector<char>>>();
    for (int peer = 0; peer < own->num_ranks; ++peer) {
      buffers->emplace_back(num_bytes);
      if (peer == own->rank) {
        std::memcpy(buffers->back().data(), input, num_bytes);
        continue;
      }
      step.sent.push_back({peer, const_cast<void*>(input), num_bytes, name});
      step.received.push_back({peer, buffers->back().data(), num_bytes, name});
    }
    step.then = [buffers, use] {
      std::vector<const void*> inputs;
      for (const auto& buffer : *buffers) inputs.push_back(buffer.data());
      use(inputs);
    };
    return step;
  });
}

thread_local std::string last_failure;

// Returns `error`, whose reason ncclGetLastError() gives. It is no error of CUDA:
// cudaGetLastError() would return that one to a later call of this thread.
int fail_call(int error, const std::string& reason) {
  last_failure = reason;
  return error;
}

int join(void** result, const std::string& id, int rank, int num_ranks) {
  try {
    auto communicator = std::make_shared<Communicator>(id, rank, num_ranks);
    std::vector<int> devices(static_cast<std::size_t>(num_ranks), communicator->device);
    std::vector<Transfer> sent, received;
    for (int peer = 0; peer < num_ranks; ++peer) {
      if (peer == rank) continue;
      sent.push_back({peer, &devices[static_cast<std::size_t>(rank)], sizeof(int), "join"});
      received.push_back({peer, &devices[static_cast<std::size_t>(peer)], sizeof(int), "join"});
    }
    communicator->wire.exchange(sent, received);
    std::sort(devices.begin(), devices.end());
    const bool is_shared = std::adjacent_find(devices.begin(), devices.end()) != devices.end();
    if (is_shared && std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") == nullptr) {
      return fail_call(kInvalidUsage, "two ranks of a communicator use one device");
    }
    *result = new Handle(std::move(communicator));
    return kSuccess;
  } catch (const std::exception& error) {
    return fail_call(kRemoteError, error.what());
  }
}

}  // namespace
}  // namespace weft::cuda_runtime

using namespace weft::cuda_runtime;  // NOLINT: the functions below are C's

// ---- communicators -----------------------------------------------------------------------------

struct UniqueId {
  char text[128];
};

WEFT_CUDA_API int ncclGetUniqueId(UniqueId* result) {
  std::random_device random;
  std::memset(result, 0, sizeof *result);
  std::snprintf(result->text, sizeof result->text, "%d-%08x%08x", getpid(), random(), random());
  return kSuccess;
}

WEFT_CUDA_API int ncclCommInitRankConfig(
    void** result, int num_ranks, UniqueId id, int rank, void* /*config*/) {
  return join(result, id.text, rank, num_ranks);
}
WEFT_CUDA_API int ncclCommInitRank(void** result, int num_ranks, UniqueId id, int rank) {
  return join(result, id.text, rank, num_ranks);
}

WEFT_CUDA_API int ncclCommSplit(void* comm, int color, int key, void** result, void* /*config*/) {
  Communicator& own = *handle_of(comm);
  std::vector<std::pair<int, int>> all(static_cast<std::size_t>(own.num_ranks));  // color, key
  all[static_cast<std::size_t>(own.rank)] = {color, key};
  std::vector<Transfer> sent, received;
  for (int peer = 0; peer < own.num_ranks; ++peer) {
    if (peer == own.rank) continue;
    const auto own_idx = static_cast<std::size_t>(own.rank);
    const auto idx = static_cast<std::size_t>(peer);
    sent.push_back({peer, &all[own_idx], sizeof all[own_idx], "split"});
    received.push_back({peer, &all[idx], sizeof all[idx], "split"});
  }
  try {
    own.wire.exchange(sent, received);
  } catch (const std::exception& error) {
    return fail_call(kRemoteError, error.what());
  }
  const std::string id =
      own.id + "." + std::to_string(own.num_splits++) + "." + std::to_string(color);
  *result = nullptr;
  if (color < 0) return kSuccess;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int rank = 0; rank < own.num_ranks; ++rank) {
    const auto [its_color, its_key] = all[static_cast<std::size_t>(rank)];
    if (its_color == color) members.emplace_back(its_key, rank);
  }
  std::sort(members.begin(), members.end());
  const auto place = std::find(members.begin(), members.end(), std::pair(key, own.rank));
  return join(
      result, id, static_cast<int>(place - members.begin()), static_cast<int>(members.size()));
}

WEFT_CUDA_API int ncclCommCount(void* comm, int* result) {
  *result = handle_of(comm)->num_ranks;
  return kSuccess;
}
WEFT_CUDA_API int ncclCommUserRank(void* comm, int* result) {
  *result = handle_of(comm)->rank;
  return kSuccess;
}

// A call that fails is an error of its stream.
WEFT_CUDA_API int ncclCommGetAsyncError(void* /*comm*/, int* result) {
  *result = kSuccess;
  return kSuccess;
}

WEFT_CUDA_API const char* ncclGetLastError(void* /*comm*/) { return last_failure.c_str(); }
WEFT_CUDA_API const char* ncclGetErrorString(int error) {
  static thread_local std::string text;
  text = "error " + std::to_string(error) + " of NCCL without a device: " + last_failure;
  return text.c_str();
}

WEFT_CUDA_API int ncclCommFinalize(void*) { return kSuccess; }
WEFT_CUDA_API int ncclCommDestroy(void* comm) {
  delete static_cast<Handle*>(comm);
  return kSuccess;
}
WEFT_CUDA_API int ncclCommAbort(void* comm) {
  handle_of(comm)->wire.abort();
  return ncclCommDestroy(comm);
}

WEFT_CUDA_API int ncclCommRegister(void*, void*, std::size_t, void** result) {
  *result = nullptr;
  return kSuccess;
}
WEFT_CUDA_API int ncclCommDeregister(void*, void*) { return kSuccess; }

WEFT_CUDA_API int ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}
WEFT_CUDA_API int ncclGroupEnd() { return end_group(); }

// ---- communication -----------------------------------------------------------------------------

WEFT_CUDA_API int ncclAllReduce(
    const void* input, void* output, std::size_t size, int type, int op, void* comm, void* stream) {
  return with_all_inputs(
      comm, stream, "all_reduce", input, size * size_of(Type(type)), [=](const auto& inputs) {
        reduce(inputs, output, size, Type(type), Operation(op));
      });
}

WEFT_CUDA_API int ncclReduce(const void* input,
                             void* output,
                             std::size_t size,
                             int type,
                             int op,
                             int root,
                             void* comm,
                             void* stream) {
  const bool is_root = handle_of(comm)->rank == root;
  return with_all_inputs(comm,
                         stream,
                         "reduce to " + std::to_string(root),
                         input,
                         size * size_of(Type(type)),
                         [=](const auto& inputs) {
                           if (is_root) reduce(inputs, output, size, Type(type), Operation(op));
                         });
}

WEFT_CUDA_API int ncclReduceScatter(
    const void* input, void* output, std::size_t size, int type, int op, void* comm, void* stream) {
  const auto rank = static_cast<std::size_t>(handle_of(comm)->rank);
  const auto num_ranks = static_cast<std::size_t>(handle_of(comm)->num_ranks);
  const std::size_t num_bytes = size * size_of(Type(type));
  return with_all_inputs(
      comm, stream, "reduce_scatter", input, num_bytes * num_ranks, [=](const auto& inputs) {
        std::vector<const void*> segments;
        for (const void* each : inputs) {
          segments.push_back(static_cast<const char*>(each) + rank * num_bytes);
        }
        reduce(segments, output, size, Type(type), Operation(op));
      });
}

WEFT_CUDA_API int ncclAllGather(
    const void* input, void* output, std::size_t size, int type, void* comm, void* stream) {
  const std::size_t num_bytes = size * size_of(Type(type));
  return with_all_inputs(comm, stream, "all_gather", input, num_bytes, [=](const auto& inputs) {
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      std::memcpy(static_cast<char*>(output) + rank * num_bytes, inputs[rank], num_bytes);
    }
  });
}

WEFT_CUDA_API int ncclBroadcast(const void* input,
                                void* output,
                                std::size_t size,
                                int type,
                                int root,
                                void* comm,
                                void* stream) {
  const std::size_t num_bytes = size * size_of(Type(type));
  // The bytes of the other ranks are not used.
  const void* sent = handle_of(comm)->rank == root ? input : output;
  return with_all_inputs(comm,
                         stream,
                         "broadcast from " + std::to_string(root),
                         sent,
                         num_bytes,
                         [=](const auto& inputs) {
                           std::memcpy(output, inputs[static_cast<std::size_t>(root)], num_bytes);
                         });
}
WEFT_CUDA_API int ncclBcast(
    void* buffer, std::size_t size, int type, int root, void* comm, void* stream) {
  return ncclBroadcast(buffer, buffer, size, type, root, comm, stream);
}

WEFT_CUDA_API int ncclSend(
    const void* input, std::size_t size, int type, int peer, void* comm, void* stream) {
  count("nccl send");
  return add(comm, stream, true, [=] {
    return Step{.sent = {{peer, const_cast<void*>(input), size * size_of(Type(type)), "send"}}};
  });
}

WEFT_CUDA_API int ncclRecv(
    void* output, std::size_t size, int type, int peer, void* comm, void* stream) {
  count("nccl recv");
  return add(comm, stream, true, [=] {
    return Step{.received = {{peer, output, size * size_of(Type(type)), "send"}}};
  });
}

// ---- not supported -----------------------------------------------------------------------------

// These replace NCCL's own functions, which cannot use this file's communicators.
#define WEFT_UNSUPPORTED(name)                                                           \
  WEFT_CUDA_API int name() {                                                             \
    return fail_call(kInvalidUsage, #name " is not supported by NCCL without a device"); \
  }

WEFT_UNSUPPORTED(ncclAlltoAll)
WEFT_UNSUPPORTED(ncclCommGetUniqueId)
WEFT_UNSUPPORTED(ncclCommGrow)
WEFT_UNSUPPORTED(ncclCommInitAll)
WEFT_UNSUPPORTED(ncclCommInitRankScalable)
WEFT_UNSUPPORTED(ncclCommMemStats)
WEFT_UNSUPPORTED(ncclCommResume)
WEFT_UNSUPPORTED(ncclCommRevoke)
WEFT_UNSUPPORTED(ncclCommShrink)
WEFT_UNSUPPORTED(ncclCommSuspend)
WEFT_UNSUPPORTED(ncclCommWindowDeregister)
WEFT_UNSUPPORTED(ncclCommWindowRegister)
WEFT_UNSUPPORTED(ncclDevCommCreate)
WEFT_UNSUPPORTED(ncclDevCommDestroy)
WEFT_UNSUPPORTED(ncclGather)
WEFT_UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
WEFT_UNSUPPORTED(ncclGetPeerDevicePointer)
WEFT_UNSUPPORTED(ncclGroupSimulateEnd)
WEFT_UNSUPPORTED(ncclMemAlloc)
WEFT_UNSUPPORTED(ncclMemFree)
WEFT_UNSUPPORTED(ncclPutSignal)
WEFT_UNSUPPORTED(ncclRedOpCreatePreMulSum)
WEFT_UNSUPPORTED(ncclRedOpDestroy)
WEFT_UNSUPPORTED(ncclSignal)
WEFT_UNSUPPORTED(ncclWaitSignal)
WEFT_UNSUPPORTED(ncclWinGetUserPtr)
