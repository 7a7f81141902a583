// Initialisation, the device, its memory.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

using namespace sim;

namespace {

std::map<void *, size_t> blocks;
int64_t used = 0;
thread_local int current_device = -1;

aclError allocate(void **address, size_t bytes) {
  if (used + (int64_t)bytes > device_memory())
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device memory exhausted");
  if (posix_memalign(address, 4096, bytes ? bytes : 1)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  memset(*address, 0xff, bytes);  // NaN: reading what nothing wrote shows
  blocks[*address] = bytes;
  used += (int64_t)bytes;
  trace("malloc %zu used=%ld", bytes, used);
  return 0;
}

aclError copy(void *to, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  Op op;
  op.name = kind == ACL_MEMCPY_DEVICE_TO_HOST ? "D2H" : kind == ACL_MEMCPY_HOST_TO_DEVICE ? "H2D" : "D2D";
  op.run = [=] { memcpy(to, from, bytes); };
  return enqueue(stream_of(stream), std::move(op));
}

}  // namespace

int64_t sim::device_memory() { return setting("CANN_SIM_MEM", 4l << 30); }

extern "C" {

aclError aclInit(const char *) { return 0; }
aclError aclFinalize() { return 0; }
const char *aclrtGetSocName() {
  const char *name = getenv("CANN_SIM_SOC");
  return name && *name ? name : "Ascend910B1";
}
aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = (uint32_t)setting("CANN_SIM_DEVICES", 1);
  return 0;
}
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= setting("CANN_SIM_DEVICES", 1)) return ACL_ERROR_INVALID_PARAM;
  current_device = device;
  return 0;
}
aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtGetDevice(int32_t *device) {
  if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current_device;
  return 0;
}
aclError aclrtGetCurrentContext(aclrtContext *context) {
  *context = (void *)(intptr_t)(current_device + 1);
  return current_device < 0 ? ACL_ERROR_RT_CONTEXT_NULL : 0;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = (int)(intptr_t)context - 1;
  return 0;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t *value) {
  *value = attribute == ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE ? device_memory() : 20;
  return 0;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
  *value = 20;
  return 0;
}
aclError aclGetCannAttribute(aclCannAttr, int32_t *value) {
  *value = 1;
  return 0;
}
aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
  static const aclCannAttr known[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *list = known;
  *count = 3;
  return 0;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
  memset(version, 0, sizeof *version);
  strcpy(version->version, "9.1.0");
  strcpy(version->majorVersion, "9");
  strcpy(version->minorVersion, "1");
  strcpy(version->releaseVersion, "0");
  return 0;
}
aclError aclsysGetVersionStr(char *, char *version) {
  strcpy(version, "9.1.0");
  return 0;
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t *value) {
  *value = 20;
  return 0;
}

// ---- compile options: kept, so that a test can see what capture sets and restores
static std::map<int, std::string> options;
size_t aclGetCompileoptSize(aclCompileOpt) { return 64; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t size) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  auto found = options.find((int)option);
  snprintf(value, size, "%s", found == options.end() ? "disable" : found->second.c_str());
  return 0;
}
aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
  ENTER(ACL_ERROR_INVALID_PARAM);
  options[(int)option] = value;
  trace("option %d=%s", (int)option, value);
  return 0;
}

// ---- memory
aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  ENTER(ACL_ERROR_RT_MEMORY_ALLOCATION);
  *total_bytes = (size_t)device_memory();
  *free_bytes = (size_t)(device_memory() - used);
  return 0;
}
aclError aclrtMalloc(void **address, size_t bytes, aclrtMemMallocPolicy) {
  ENTER(ACL_ERROR_RT_MEMORY_ALLOCATION);
  return allocate(address, bytes);
}
aclError aclrtMallocAlign32(void **address, size_t bytes, aclrtMemMallocPolicy) {
  ENTER(ACL_ERROR_RT_MEMORY_ALLOCATION);
  return allocate(address, bytes);
}
aclError aclrtFree(void *address) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  auto block = blocks.find(address);
  if (block == blocks.end()) return ACL_ERROR_INVALID_PARAM;
  used -= (int64_t)block->second;
  blocks.erase(block);
  free(address);
  return 0;
}
aclError aclrtMallocHost(void **address, size_t bytes) {
  ENTER(ACL_ERROR_RT_MEMORY_ALLOCATION);
  return posix_memalign(address, 4096, bytes ? bytes : 1);
}
aclError aclrtMallocHostWithCfg(void **address, uint64_t bytes, aclrtMallocConfig *) {
  ENTER(ACL_ERROR_RT_MEMORY_ALLOCATION);
  return posix_memalign(address, 4096, bytes ? bytes : 1);
}
aclError aclrtFreeHost(void *address) {
  free(address);
  return 0;
}
aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind) {
  ENTER(ACL_ERROR_RT_MODEL_EXECUTE);
  trace("sync memcpy");
  if (any_capture())
    if (aclError code = refuse_sync_in_capture(nullptr)) return code;
  pump();
  memcpy(to, from, bytes);
  return 0;
}
aclError aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  return copy(to, from, bytes, kind, stream);
}
aclError aclrtMemcpyAsyncWithCondition(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  return copy(to, from, bytes, kind, stream);
}
aclError aclrtMemset(void *address, size_t, int32_t value, size_t bytes) {
  memset(address, value, bytes);
  return 0;
}
aclError aclrtMemsetAsync(void *address, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  ENTER(ACL_ERROR_RT_STREAM_CONTEXT);
  Op op;
  op.name = "memset";
  op.run = [=] { memset(address, value, bytes); };
  return enqueue(stream_of(stream), std::move(op));
}

}  // extern "C"
