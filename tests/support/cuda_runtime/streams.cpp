// Streams, events and graphs.
//
// Each stream has a queue of work items and a thread that runs them in order. On its own a stream
// advances only slowly: each item waits for `delay_ms`, unless it is needed. The host needs the
// items of a stream when it waits for the stream, for an event or for the device; a stream needs
// the items of another one before an event that it waits for. So work that nothing orders runs as
// late as possible: if a wait is missing, the reader runs first and reads old bytes; if memory is
// freed while a stream still uses it, the next owner of the memory writes first.
//
// A captured stream appends to its graph in place of its queue. A graph is the list of its items in
// the order of capture, which respects all of their dependencies; a launch runs the list as one
// item.

#include "runtime.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace weft::cuda_runtime {
namespace {

using Clock = std::chrono::steady_clock;

struct Stream;

struct Event {
  bool has_timing = true;
  Stream* stream = nullptr;  // the stream of the last record, or none
  uint64_t position = 0;     // the number of the stream's items up to the record
  std::shared_ptr<Clock::time_point> time = std::make_shared<Clock::time_point>();
  unsigned long long capture = 0;  // the id of the capture of the last record, or 0
};

struct Graph {
  unsigned long long id = 0;
  std::vector<std::function<void()>> work = {};
  std::set<Stream*> streams = {};  // those that are captured
};

struct Work {
  std::function<void()> run = {};
  // For a wait: another stream, and the number of its items up to the event.
  Stream* needed_stream = nullptr;
  uint64_t needed_position = 0;
};

struct Stream {
  int device = 0;
  int priority = 0;
  std::deque<Work> queue = {};
  uint64_t num_submitted = 0;
  uint64_t num_done = 0;
  uint64_t needed = 0;  // the number of items that a wait needs
  Graph* graph = nullptr;
  bool has_thread = false;
  // The stream's thread waits until it has work or its work is needed (`changed`); others wait
  // until its items are done (`progressed`).
  std::condition_variable changed = {};
  std::condition_variable progressed = {};
};

// The streams of the process. Never destroyed: their threads use this object until the process
// ends.
struct State {
  std::mutex mutex;
  std::map<int, Stream*> default_streams;
  std::set<Stream*> streams;
  unsigned long long num_captures = 0;
  std::map<unsigned long long, Graph*> captures;  // those that have not ended, by id
};

State& state() {
  static State& instance = *new State;
  return instance;
}

void need(Stream& stream, uint64_t position) {
  if (stream.needed >= position) return;
  stream.needed = position;
  stream.changed.notify_one();
}

// REQUIRES: `lock` holds the mutex. It is released during the wait.
void wait_until_done(std::unique_lock<std::mutex>& lock, Stream& stream, uint64_t position) {
  need(stream, position);
  stream.progressed.wait(lock, [&] { return stream.num_done >= position; });
}

void run_stream(Stream& stream) {
  std::unique_lock lock(state().mutex);
  while (true) {
    stream.changed.wait(lock, [&] { return !stream.queue.empty(); });
    const uint64_t position = stream.num_done + 1;
    const auto is_needed = [&] { return stream.needed >= position; };
    const std::chrono::milliseconds delay(settings().delay_ms);
    if (delay.count() > 0) stream.changed.wait_for(lock, delay, is_needed);
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (work.needed_stream != nullptr) {
      wait_until_done(lock, *work.needed_stream, work.needed_position);
    } else {
      lock.unlock();
      try {
        if (status() == cudaSuccess) work.run();
      } catch (const std::exception& error) {
        fail_all_later_calls(error.what());
      }
      work.run = nullptr;
      lock.lock();
    }
    ++stream.num_done;
    stream.progressed.notify_all();
  }
}

// REQUIRES: the mutex is held.
Stream& stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
    return *reinterpret_cast<Stream*>(handle);
  }
  Stream*& own = state().default_streams[current_device()];
  if (own == nullptr) {
    own = new Stream;
    own->device = current_device();
    state().streams.insert(own);
  }
  return *own;
}

// REQUIRES: the mutex is held.
void append(Stream& stream, Work work) {
  if (stream.graph != nullptr) {
    if (work.needed_stream == nullptr) stream.graph->work.push_back(std::move(work.run));
    return;
  }
  if (!stream.has_thread) {
    stream.has_thread = true;
    std::thread([&stream] { run_stream(stream); }).detach();
  }
  stream.queue.push_back(std::move(work));
  ++stream.num_submitted;
  stream.changed.notify_one();
}

// REQUIRES: the mutex is held. A query is not counted as a synchronization: NCCL's process group
// queries all the time.
cudaError_t query(const Stream& stream, uint64_t position) {
  return stream.num_done >= position ? status() : cudaErrorNotReady;
}

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

cudaError_t create_stream(cudaStream_t* result, int priority) {
  if (const auto error = status(); error != cudaSuccess) return error;
  const std::lock_guard lock(state().mutex);
  auto* stream = new Stream;
  stream->device = current_device();
  stream->priority = priority;
  state().streams.insert(stream);
  *result = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

}  // namespace

void submit(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard lock(state().mutex);
  append(stream_of(stream), {.run = std::move(work)});
}

bool is_captured(cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  return stream_of(stream).graph != nullptr;
}

void wait_for_stream(cudaStream_t handle) {
  std::unique_lock lock(state().mutex);
  Stream& stream = stream_of(handle);
  wait_until_done(lock, stream, stream.num_submitted);
}

void wait_for_device(int device) {
  std::unique_lock lock(state().mutex);
  for (Stream* stream : std::vector(state().streams.begin(), state().streams.end())) {
    if (stream->device == device) wait_until_done(lock, *stream, stream->num_submitted);
  }
}

}  // namespace weft::cuda_runtime

using namespace weft::cuda_runtime;  // NOLINT: the functions below are C's

WEFT_CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* result) {
  return create_stream(result, 0);
}
WEFT_CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* result, unsigned) {
  return create_stream(result, 0);
}
WEFT_CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* result,
                                                       unsigned,
                                                       int priority) {
  return create_stream(result, priority);
}

WEFT_CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t /*stream*/) {
  return cudaSuccess;  // its thread may still run work
}

WEFT_CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  const std::lock_guard lock(state().mutex);
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_captured(stream)) {
    return fail(cudaErrorStreamCaptureUnsupported, "the host waits for a stream that is captured");
  }
  count("synchronizations");
  wait_for_stream(stream);
  return status();
}

WEFT_CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const std::lock_guard lock(state().mutex);
  Stream& stream = stream_of(handle);
  return query(stream, stream.num_submitted);
}

WEFT_CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle,
                                              cudaEvent_t event_handle,
                                              unsigned) {
  const std::lock_guard lock(state().mutex);
  Stream& stream = stream_of(handle);
  const Event& event = event_of(event_handle);
  if (event.capture != 0) {
    const auto capture = state().captures.find(event.capture);
    if (capture == state().captures.end()) {
      return fail(cudaErrorCapturedEvent,
                  "a stream waits for an event of a capture that has ended");
    }
    if (stream.graph != nullptr && stream.graph != capture->second) {
      return fail(cudaErrorStreamCaptureMerge, "a captured stream waits for another capture");
    }
    stream.graph = capture->second;  // joins the capture
    stream.graph->streams.insert(&stream);
    return cudaSuccess;
  }
  if (event.stream == nullptr) return cudaSuccess;
  if (stream.graph != nullptr) {
    return fail(cudaErrorStreamCaptureIsolation,
                "a captured stream waits for an event that was recorded outside of the capture");
  }
  append(stream, {.needed_stream = event.stream, .needed_position = event.position});
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  submit(stream, [call, data] { call(data); });
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                                cudaStreamCallback_t call,
                                                void* data,
                                                unsigned) {
  submit(stream, [=] { call(stream, status(), data); });
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaDeviceSynchronize() {
  count("synchronizations");
  wait_for_device(current_device());
  return status();
}

// ---- events ------------------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* result, unsigned flags) {
  *result =
      reinterpret_cast<cudaEvent_t>(new Event{.has_timing = (flags & cudaEventDisableTiming) == 0});
  return status();
}
WEFT_CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* result) {
  return cudaEventCreateWithFlags(result, cudaEventDefault);
}

WEFT_CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const std::lock_guard lock(state().mutex);
  Stream& stream = stream_of(stream_handle);
  Event& event = event_of(handle);
  event.stream = &stream;
  event.capture = stream.graph == nullptr ? 0 : stream.graph->id;
  if (stream.graph != nullptr) return cudaSuccess;
  event.time = std::make_shared<Clock::time_point>();
  append(stream, {.run = [time = event.time] { *time = Clock::now(); }});
  event.position = stream.num_submitted;
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event,
                                                   cudaStream_t stream,
                                                   unsigned) {
  return cudaEventRecord(event, stream);
}

WEFT_CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const std::lock_guard lock(state().mutex);
  const Event& event = event_of(handle);
  if (event.stream == nullptr || event.capture != 0) return status();
  return query(*event.stream, event.position);
}

WEFT_CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  count("synchronizations");
  std::unique_lock lock(state().mutex);
  const Event& event = event_of(handle);
  if (event.capture != 0) {
    return fail(cudaErrorCapturedEvent,
                "the host waits for an event that was recorded in a capture");
  }
  if (event.stream != nullptr) wait_until_done(lock, *event.stream, event.position);
  return status();
}

WEFT_CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds,
                                               cudaEvent_t start_handle,
                                               cudaEvent_t end_handle) {
  const std::lock_guard lock(state().mutex);
  const Event& start = event_of(start_handle);
  const Event& end = event_of(end_handle);
  if (!start.has_timing || !end.has_timing || start.stream == nullptr || end.stream == nullptr) {
    return fail(cudaErrorInvalidResourceHandle, "an event has no time");
  }
  if (const auto error = query(*start.stream, start.position); error != cudaSuccess) return error;
  if (const auto error = query(*end.stream, end.position); error != cudaSuccess) return error;
  *milliseconds = std::chrono::duration<float, std::milli>(*end.time - *start.time).count();
  return cudaSuccess;
}

// ---- graphs ------------------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const std::lock_guard lock(state().mutex);
  Stream& stream = stream_of(handle);
  if (stream.graph != nullptr) {
    return fail(cudaErrorIllegalState, "a stream is captured already");
  }
  stream.graph = new Graph{.id = ++state().num_captures, .streams = {&stream}};
  state().captures[stream.graph->id] = stream.graph;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* result) {
  const std::lock_guard lock(state().mutex);
  Graph* graph = stream_of(handle).graph;
  if (graph == nullptr) return fail(cudaErrorIllegalState, "a stream is not captured");
  for (Stream* stream : graph->streams) stream->graph = nullptr;
  state().captures.erase(graph->id);
  *result = reinterpret_cast<cudaGraph_t>(graph);
  return status();
}

WEFT_CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                                cudaStreamCaptureStatus* result) {
  *result = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                   cudaStreamCaptureStatus* result,
                                                   unsigned long long* id,
                                                   cudaGraph_t* graph,
                                                   const cudaGraphNode_t** dependencies,
                                                   const cudaGraphEdgeData** edges,
                                                   std::size_t* num_dependencies) {
  const std::lock_guard lock(state().mutex);
  const Graph* captured = stream_of(handle).graph;
  *result = captured == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = captured == nullptr ? 0 : captured->id;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(const_cast<Graph*>(captured));
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph,
                                            cudaGraphNode_t* nodes,
                                            std::size_t* num_nodes) {
  if (nodes != nullptr) return fail(cudaErrorNotSupported, "graphs have no nodes here");
  *num_nodes = reinterpret_cast<Graph*>(graph)->work.size();
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* result,
                                                        cudaGraph_t graph,
                                                        unsigned long long) {
  *result = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* result,
                                               cudaGraph_t graph,
                                               unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(result, graph, flags);
}

WEFT_CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  submit(stream, [work = reinterpret_cast<Graph*>(graph)->work] {
    for (const auto& run : work) run();
  });
  return status();
}

WEFT_CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
WEFT_CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
