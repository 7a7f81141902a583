// Scheduler, streams, events, value flags; trace and fault injection.
#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace sim {

std::recursive_mutex mu;
std::vector<Stream *> streams;
int live_models = 0;

namespace {

std::condition_variable_any changed;
std::string last_error;
std::string device_error;
FILE *trace_file = nullptr;
bool trace_opened = false;

struct Fault {
  std::string call;
  long nth;
  aclError code;  // 0: the call's usual error
};
std::vector<Fault> faults;
std::map<std::string, long> calls;
bool faults_read = false;

double now() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

// "call:nth[:code];..." with nth counted from this moment on, first call = 1.
void arm(const char *spec) {
  faults.clear();
  calls.clear();
  std::string text = spec ? spec : "";
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find(';', at), text.size());
    std::string one = text.substr(at, end - at);
    size_t first = one.find(':'), second = one.find(':', first + 1);
    if (first == std::string::npos) {
      fprintf(stderr, "CANN_SIM_FAIL: %s is not call:nth[:code]\n", one.c_str());
      abort();
    }
    long code = second == std::string::npos ? 0 : atol(one.c_str() + second + 1);
    faults.push_back({one.substr(0, first), atol(one.c_str() + first + 1), (aclError)code});
    at = end + 1;
  }
}

// When queued work runs: at once, or only where the host waits; in order of the streams, or in a
// random one.
struct Schedule {
  bool lazy = setting("CANN_SIM_LAZY", 0);
  bool shuffled = setting("CANN_SIM_SEED", 0);
  std::mt19937 random{(unsigned)setting("CANN_SIM_SEED", 0)};
};
Schedule &schedule() {
  static Schedule only;
  return only;
}

bool run_op(Stream *stream, Op &op) {  // false: blocked
  switch (op.kind) {
    case Kind::run:
      trace("run %s stream=%d", op.name.c_str(), stream->id);
      if (op.run) try {
          op.run();
        } catch (const std::exception &error) {
          report_device_error(op.name + ": " + error.what());
        }
      return true;
    case Kind::record:
      op.event->done = std::max(op.event->done, op.generation);
      op.event->milliseconds = now();
      trace("record event=%d stream=%d", op.event->id, stream->id);
      return true;
    case Kind::wait:
      if (op.event->done < op.generation) return false;
      trace("waited event=%d stream=%d", op.event->id, stream->id);
      return true;
    case Kind::reset:
      op.event->issued = op.event->done = 0;
      trace("reset event=%d stream=%d", op.event->id, stream->id);
      return true;
    case Kind::value_wait:
      if (!op.ready()) return false;
      trace("waited %s stream=%d", op.name.c_str(), stream->id);
      return true;
    case Kind::update: {
      Group *group = op.group;
      for (Stream *other : streams)
        if (other->started && !other->queue.empty() && other->queue.front().model == group->model &&
            other->cursor > group->first)
          trace("HAZARD update of group=%d after model=%d passed it", group->id, group->model->id);
      for (size_t i = 0; i < group->count; i++) group->model->ops[group->first + i] = op.patch[i];
      trace("update group=%d model=%d stream=%d", group->id, group->model->id, stream->id);
      return true;
    }
    case Kind::execute:
      break;
  }
  return true;
}

// One task of one stream: the front op, or one op of the model that it executes.
bool advance(Stream *stream) {
  if (stream->queue.empty()) return false;
  Op &op = stream->queue.front();
  if (op.kind != Kind::execute) {
    if (!run_op(stream, op)) return false;
    stream->queue.pop_front();
    return true;
  }
  Model *model = op.model;
  if (!stream->started) {
    stream->started = true;
    trace("exec model=%d stream=%d begin", model->id, stream->id);
  }
  if (stream->cursor < model->ops.size()) {
    if (!run_op(stream, model->ops[stream->cursor])) return false;
    stream->cursor++;
    return true;
  }
  stream->cursor = 0;
  stream->started = false;
  model->queued--;
  trace("exec model=%d stream=%d end", model->id, stream->id);
  stream->queue.pop_front();
  return true;
}

}  // namespace

long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

void trace(const char *format, ...) {
  if (!trace_opened) {
    trace_opened = true;
    const char *path = getenv("CANN_SIM_LOG");
    if (path && *path) trace_file = strcmp(path, "-") ? fopen(path, "a") : stderr;
  }
  if (!trace_file) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(trace_file, format, arguments);
  va_end(arguments);
  fputc('\n', trace_file);
  fflush(trace_file);
}

aclError fail(aclError code, const std::string &why) {
  last_error = why;
  trace("ERROR %d %s", code, why.c_str());
  return code;
}

void report_device_error(const std::string &why) {
  trace("DEVICE ERROR %s", why.c_str());
  if (device_error.empty()) device_error = why;
}

aclError injected(const char *call, aclError usual) {
  if (!faults_read) {
    faults_read = true;
    if (const char *spec = getenv("CANN_SIM_FAIL")) arm(spec);
  }
  long nth = ++calls[call];
  for (const Fault &fault : faults)
    if (fault.call == call && fault.nth == nth) {
      trace("INJECTED %s call=%ld", call, nth);
      return fail(fault.code ? fault.code : usual, std::string("injected failure of ") + call);
    }
  return 0;
}

int next_id() {
  static int id = 0;
  return ++id;
}

Stream *default_stream() {
  static Stream *stream = [] {
    auto *created = new Stream{0};
    streams.insert(streams.begin(), created);
    return created;
  }();
  return stream;
}

Stream *stream_of(aclrtStream handle) {
  return handle ? static_cast<Stream *>(handle) : default_stream();
}

bool pump() {
  bool shuffled = schedule().shuffled;
  bool any = false, moved = true;
  while (moved) {
    moved = false;
    std::vector<Stream *> order(streams);
    if (shuffled) std::shuffle(order.begin(), order.end(), schedule().random);
    for (Stream *stream : order)
      while (advance(stream)) {
        moved = any = true;
        if (shuffled) break;
      }
  }
  if (any) changed.notify_all();
  return any;
}

// A device makes progress while the host polls; in lazy scheduling that takes a few polls, so
// that one query in passing is not yet a wait.
void pump_if_polled(int &idle_queries, const std::function<bool()> &done) {
  if (done()) {
    idle_queries = 0;
  } else if (++idle_queries >= 3) {
    trace("sync poll");
    pump();
  }
}

aclError enqueue(Stream *stream, Op op) {
  // Ops of a capture always find their record: a model runs in order.
  if (op.kind == Kind::record && !stream->capture) op.generation = ++op.event->issued;
  if (op.kind == Kind::wait && !stream->capture) op.generation = std::max(op.event->issued, 1l);
  if (stream->open_update) {
    stream->patch.push_back(std::move(op));
    return 0;
  }
  if (Model *model = stream->capture) {
    bool external = op.event && (op.event->flag & ACL_EVENT_EXTERNAL);
    if (op.kind == Kind::wait && !external && op.event->captured_in != model) {
      model->invalid = true;
      return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "the captured stream waits for an event recorded outside");
    }
    size_t index = model->ops.size();
    if (op.kind == Kind::record && !external) {
      op.event->captured_in = model;
      op.event->recorded_on = stream;
      op.event->recorded_at = index;
    }
    if (op.kind == Kind::wait && op.event->recorded_on) model->joined_up_to[op.event->recorded_on] = op.event->recorded_at;
    model->last_op[stream] = index;
    trace("capture model=%d stream=%d %s", model->id, stream->id, op.name.c_str());
    model->ops.push_back(std::move(op));
    return 0;
  }
  if (op.kind == Kind::wait && op.event->captured_in) {  // a side stream joins the capture
    auto *model = static_cast<Model *>(op.event->captured_in);
    stream->capture = model;
    model->streams.insert(stream);
    op.generation = 0;
    model->ops.push_back(std::move(op));
    return 0;
  }
  if (op.kind == Kind::execute) op.model->queued++;
  stream->queue.push_back(std::move(op));
  if (!schedule().lazy) pump();
  return 0;
}

aclError drain(const std::function<bool()> &done, int32_t timeout_ms) {
  std::unique_lock<std::recursive_mutex> lock(mu);
  long limit_ms = setting("CANN_SIM_TIMEOUT_MS", 500);
  if (timeout_ms >= 0) limit_ms = std::min<long>(limit_ms, timeout_ms);
  auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
  for (;;) {
    pump();
    if (!device_error.empty()) {
      std::string why;
      why.swap(device_error);
      return fail(ACL_ERROR_RT_MODEL_EXECUTE, why);
    }
    if (done()) return 0;
    if (changed.wait_until(lock, until) == std::cv_status::timeout && !done()) {
      trace("HANG");
      return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "a queued wait is never satisfied");
    }
  }
}

bool any_capture() {
  return std::any_of(streams.begin(), streams.end(), [](Stream *s) { return s->capture; });
}

aclError refuse_sync_in_capture(Stream *stream) {
  for (Stream *other : streams) {
    if (!other->capture) continue;
    bool whole_device = !stream && other->capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
    if (other == stream || whole_device) {
      other->capture->invalid = true;
      return fail(ACL_ERROR_RT_STREAM_CAPTURED, "synchronise while a stream is captured");
    }
  }
  return 0;
}

}  // namespace sim

using namespace sim;

extern "C" {

// ---- for tests, through ctypes
void cann_sim_arm(const char *spec) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  faults_read = true;
  arm(spec);
}
long cann_sim_calls(const char *call) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  return calls.count(call) ? calls[call] : 0;
}
// "call count\n" for every call since the last cann_sim_arm; the string lives until the next one.
const char *cann_sim_all_calls() {
  std::lock_guard<std::recursive_mutex> lock(mu);
  static std::string text;
  text.clear();
  for (auto &[call, count] : calls) text += call + " " + std::to_string(count) + "\n";
  return text.c_str();
}
void cann_sim_schedule(int lazy, unsigned seed) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  schedule() = {lazy != 0, seed != 0, std::mt19937(seed)};
}
void cann_sim_trace_to(const char *path) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  if (trace_file && trace_file != stderr) fclose(trace_file);
  trace_opened = true;
  trace_file = path && *path ? fopen(path, "a") : nullptr;
}
void cann_sim_mark(const char *text) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  trace("MARK %s", text);
}

const char *aclGetRecentErrMsg() { return last_error.c_str(); }

// ---- streams
aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t, uint32_t) {
  ENTER(ACL_ERROR_RT_NO_STREAM_RESOURCE);
  default_stream();
  if ((long)streams.size() + live_models > setting("CANN_SIM_STREAMS", 2048))
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "stream resources exhausted");
  auto *stream = new Stream{next_id()};
  streams.push_back(stream);
  *handle = stream;
  trace("stream create %d live=%zu", stream->id, streams.size());
  return 0;
}
aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }
aclError aclrtDestroyStream(aclrtStream handle) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  pump();
  if (!handle) return 0;
  streams.erase(std::remove(streams.begin(), streams.end(), stream_of(handle)), streams.end());
  delete stream_of(handle);
  return 0;
}
aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
  *id = stream_of(handle)->id;
  return 0;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  Stream *stream = nullptr;
  {
    ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
    stream = stream_of(handle);
    trace("sync stream=%d", stream->id);
    if (aclError code = refuse_sync_in_capture(stream)) return code;
  }
  return drain([=] { return stream->queue.empty(); }, timeout_ms);
}
aclError aclrtSynchronizeStream(aclrtStream handle) { return aclrtSynchronizeStreamWithTimeout(handle, -1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  {
    ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
    trace("sync device");
    if (aclError code = refuse_sync_in_capture(nullptr)) return code;
  }
  auto idle = [] {
    return std::all_of(streams.begin(), streams.end(), [](Stream *s) { return s->queue.empty(); });
  };
  return drain(idle, timeout_ms);
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }
aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
  Stream *stream = stream_of(handle);
  pump_if_polled(stream->idle_queries, [=] { return stream->queue.empty(); });
  *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

// ---- events
aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
  ENTER(ACL_ERROR_RT_NO_EVENT_RESOURCE);
  auto *event = new Event{next_id(), flag};
  *handle = event;
  trace("event create %d flag=%#x", event->id, flag);
  return 0;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) { return aclrtCreateEventExWithFlag(handle, flag); }
aclError aclrtDestroyEvent(aclrtEvent) { return 0; }  // kept: captured models may name it
static aclError queue_event(Kind kind, const char *name, aclrtEvent handle, aclrtStream stream) {
  Op op;
  op.kind = kind;
  op.name = name;
  op.event = static_cast<Event *>(handle);
  return enqueue(stream_of(stream), std::move(op));
}
aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  auto *event = static_cast<Event *>(handle);
  if (!stream_of(stream)->capture) {
    event->captured_in = nullptr;
    event->idle_queries = 0;
  }
  return queue_event(Kind::record, "RECORD", handle, stream);
}
aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  return queue_event(Kind::reset, "RESET", handle, stream);
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  return queue_event(Kind::wait, "WAIT", handle, stream);
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  auto *event = static_cast<Event *>(handle);
  {
    ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
    trace("sync event=%d", event->id);
    if (any_capture())
      if (aclError code = refuse_sync_in_capture(nullptr)) return code;
  }
  return drain([=] { return event->done == event->issued; });
}
aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
  ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
  auto *event = static_cast<Event *>(handle);
  auto reached = [=] { return event->done == event->issued; };
  pump_if_polled(event->idle_queries, reached);
  *status = reached() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = (float)(static_cast<Event *>(end)->milliseconds - static_cast<Event *>(start)->milliseconds);
  return 0;
}

// ---- value flags: what an ExternalEvent is made of
aclError aclrtValueWrite(void *address, uint64_t value, uint32_t, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  Op op;
  char name[64];
  snprintf(name, sizeof name, "VALUE_WRITE %p=%lu", address, value);
  op.name = name;
  op.run = [=] {
    auto *flag = static_cast<volatile uint64_t *>(address);
    if (value == 1 && *flag == 1) trace("HAZARD lost wake-up: %p was already set", address);
    *flag = value;
  };
  return enqueue(stream_of(stream), std::move(op));
}
aclError aclrtValueWait(void *address, uint64_t value, uint32_t mode, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  Op op;
  char name[64];
  snprintf(name, sizeof name, "VALUE_WAIT %p=%lu", address, value);
  op.kind = Kind::value_wait;
  op.name = name;
  op.ready = [=] {
    uint64_t flag = *static_cast<volatile uint64_t *>(address);
    switch (mode) {
      case ACL_STREAM_WAIT_VALUE_GEQ: return (int64_t)(flag - value) >= 0;
      case ACL_STREAM_WAIT_VALUE_EQ: return flag == value;
      case ACL_STREAM_WAIT_VALUE_AND: return (flag & value) != 0;
      default: return ~(flag | value) != 0;
    }
  };
  return enqueue(stream_of(stream), std::move(op));
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  Op op;
  op.name = "hostfunc";
  op.run = [=] { function(argument); };
  return enqueue(stream_of(stream), std::move(op));
}

}  // extern "C"
