// Model runtime instances ("ACL graphs"): capture, replay, task groups and their update.
#include "runtime.h"

using namespace sim;

namespace {

std::string kernel_of(const Op &op) { return op.name.substr(0, op.name.find('[')); }

}  // namespace

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  ENTER(ACL_ERROR_RT_NO_STREAM_RESOURCE);
  Stream *stream = stream_of(handle);
  if (stream == default_stream())
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream is already captured");
  if ((long)streams.size() + live_models + 1 > setting("CANN_SIM_STREAMS", 2048))
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "a captured model needs a stream resource, none is left");
  auto *model = new Model{next_id()};
  model->mode = mode;
  model->origin = stream;
  model->streams.insert(stream);
  stream->capture = model;
  live_models++;
  trace("capture begin model=%d stream=%d mode=%d", model->id, stream->id, (int)mode);
  return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *out) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  Model *model = stream_of(handle)->capture;
  if (out) *out = model;
  *status = !model           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : model->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                             : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *out) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  aclError fault = injected(__func__, ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED);
  Stream *stream = stream_of(handle);
  Model *model = stream->capture;
  if (!model) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "stream is not captured");
  if (model->origin != stream)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "capture was begun on another stream");
  bool joined = true;
  for (Stream *other : model->streams) {
    bool worked = other != stream && model->last_op.count(other);
    if (worked)
      joined &= model->joined_up_to.count(other) && model->joined_up_to[other] >= model->last_op[other];
    other->capture = nullptr;
  }
  bool open = stream->open_group;
  stream->open_group = nullptr;
  trace("capture end model=%d ops=%zu groups=%zu", model->id, model->ops.size(), model->groups.size());
  *out = nullptr;
  if (fault || model->invalid || open || !joined) live_models--;  // the model itself stays: groups may name it
  if (fault) return fault;
  if (model->invalid) return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated");
  if (open) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is still open");
  if (!joined) return fail(ACL_ERROR_RT_STREAM_UNJOINED, "a side stream was not joined");
  *out = model;
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *) { return 0; }

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
  Op op;
  op.kind = Kind::execute;
  op.name = "EXECUTE";
  op.model = static_cast<Model *>(handle);
  trace("replay model=%d stream=%d", op.model->id, stream_of(stream)->id);
  return enqueue(stream_of(stream), std::move(op));
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
  ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
  auto *model = static_cast<Model *>(handle);
  if (model->queued) {
    trace("HAZARD model=%d destroyed while a replay is queued", model->id);
    return fail(ACL_ERROR_RT_MODEL_RUNNING, "model destroyed while it runs");
  }
  trace("destroy model=%d", model->id);
  live_models--;
  delete model;
  return 0;
}

aclError aclmdlRIDebugPrint(aclmdlRI) { return 0; }
aclError aclmdlRIGetId(aclmdlRI handle, uint32_t *id) {
  *id = (uint32_t) static_cast<Model *>(handle)->id;
  return 0;
}

// ---- task groups
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  ENTER(ACL_ERROR_STREAM_TASK_GROUP_STATUS);
  Stream *stream = stream_of(handle);
  if (!stream->capture) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "task group outside capture");
  if (stream->open_group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "task groups do not nest");
  Model *model = stream->capture;
  model->groups.emplace_back(new Group{next_id(), model, model->ops.size(), 0});
  stream->open_group = model->groups.back().get();
  return 0;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *out) {
  ENTER(ACL_ERROR_STREAM_TASK_GROUP_STATUS);
  Stream *stream = stream_of(handle);
  Group *group = stream->open_group;
  if (!group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no open task group");
  group->count = stream->capture->ops.size() - group->first;
  stream->open_group = nullptr;
  *out = group;
  trace("group end group=%d model=%d ops=%zu", group->id, group->model->id, group->count);
  return 0;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  ENTER(ACL_ERROR_STREAM_TASK_GROUP_STATUS);
  Stream *stream = stream_of(handle);
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "update on a captured stream");
  for (Stream *other : streams)
    if (other->open_update)
      return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update is already open in this process");
  stream->open_update = static_cast<Group *>(group);
  stream->patch.clear();
  return 0;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  aclError fault = injected(__func__, ACL_ERROR_STREAM_TASK_GROUP_STATUS);
  Stream *stream = stream_of(handle);
  Group *group = stream->open_update;
  if (!group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no open update");
  stream->open_update = nullptr;
  if (fault) return fault;
  if (stream->patch.size() != group->count)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the update issued another number of tasks than the group holds");
  for (size_t i = 0; i < group->count; i++)
    if (kernel_of(stream->patch[i]) != kernel_of(group->model->ops[group->first + i]))
      return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the update issued another kernel than the group holds");
  Op op;
  op.kind = Kind::update;
  op.name = "UPDATE";
  op.group = group;
  op.patch.swap(stream->patch);
  return enqueue(stream, std::move(op));
}

}  // extern "C"
