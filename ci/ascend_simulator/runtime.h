// What the parts of the simulated CANN runtime share: the scheduler's objects, the trace, fault
// injection. README.md says what is simulated and what is assumed.
#pragma once
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

extern std::recursive_mutex mu;

long setting(const char *name, long otherwise);
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
aclError fail(aclError code, const std::string &why);

// The error to return instead of serving this call, or 0 (CANN_SIM_FAIL, cann_sim_arm).
aclError injected(const char *call, aclError usual);

// Opens every entry point that can be made to fail: takes the lock, counts the call.
#define ENTER(usual_code)                                \
  std::lock_guard<std::recursive_mutex> entered(sim::mu); \
  if (aclError code = sim::injected(__func__, usual_code)) return code

int next_id();

struct Event {
  int id;
  uint32_t flag;
  long issued = 0, done = 0;  // records queued and records reached: a wait is for those before it
  void *captured_in = nullptr;
  struct Stream *recorded_on = nullptr;  // within a capture, with the op it stands for
  size_t recorded_at = 0;
  double milliseconds = 0;
  int idle_queries = 0;
};

struct Model;

struct Group {
  int id;
  Model *model;
  size_t first = 0, count = 0;
};

enum class Kind { run, record, wait, reset, execute, update, value_wait };

struct Op {
  Kind kind = Kind::run;
  std::string name;
  std::function<void()> run;
  std::function<bool()> ready;
  Event *event = nullptr;
  long generation = 0;  // which record of the event
  Model *model = nullptr;
  Group *group = nullptr;
  std::vector<Op> patch;
};

struct Stream;

struct Model {
  int id;
  std::vector<Op> ops;
  std::vector<std::unique_ptr<Group>> groups;
  bool invalid = false;
  aclmdlRICaptureMode mode{};
  Stream *origin = nullptr;
  std::set<Stream *> streams;
  std::map<Stream *, size_t> last_op, joined_up_to;  // of side streams
  int queued = 0;  // replays that have not finished
};

struct Stream {
  int id;
  std::deque<Op> queue;
  size_t cursor = 0;  // next op of the model that the front op executes
  bool started = false;
  Model *capture = nullptr;
  Group *open_group = nullptr;
  Group *open_update = nullptr;
  std::vector<Op> patch;
  int idle_queries = 0;
};

extern std::vector<Stream *> streams;  // by id
extern int live_models;

Stream *stream_of(aclrtStream handle);
Stream *default_stream();
aclError enqueue(Stream *stream, Op op);
bool pump();  // run what can run; whether anything ran
void pump_if_polled(int &idle_queries, const std::function<bool()> &done);
aclError drain(const std::function<bool()> &done, int32_t timeout_ms = -1);  // call without the lock
bool any_capture();
aclError refuse_sync_in_capture(Stream *stream);  // null: the whole device
void report_device_error(const std::string &why);
int64_t device_memory();

}  // namespace sim
