// Making, splitting and ending communicators; what can be asked of them.
#include "comm.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "arithmetic.h"
#include "counters.h"

extern "C" int cudaGetDevice(int* device);
extern "C" int cudaMalloc(void** address, size_t size);
extern "C" int cudaFree(void* address);

namespace {

constexpr int kVersion = 23007;  // of the NCCL whose interface this is
constexpr int kUndefined = INT32_MIN;
thread_local std::string t_error;

// NCCL's last error is the process's: torch's watchdog asks for that of another thread.
std::mutex* const g_lock = new std::mutex;
std::string* const g_error = new std::string;

std::string here() {
  int device = -1;
  cudaGetDevice(&device);
  const char* host = std::getenv("NCCL_HOSTID");
  return std::string("host ") + (host != nullptr && *host != 0 ? host : "0") + ", GPU " +
         std::to_string(device);
}

void nap(const char* variable) {
  const int milliseconds = number_of(variable, 0);
  if (milliseconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void finish(Comm* comm, Result result) {
  count(result == kSuccess ? kCreated : kFailed);
  if (result != kSuccess) comm->error = t_error;
  comm->state = result;
  write_counters();
}

Comm* make(const Config* config, const Comm* parent) {
  auto* comm = new Comm;
  comm->device = parent != nullptr ? parent->device : here();
  comm->blocking = config != nullptr && config->blocking != kUndefined ? config->blocking != 0
                   : parent != nullptr                                 ? parent->blocking
                                                                       : true;
  return comm;
}

// Runs it here, or beside the caller where the communicator does not block or a group collects.
Result start(Comm* comm, std::function<void()> work) {
  if (comm->blocking && !in_group()) {
    work();
    return static_cast<Result>(comm->state.load());
  }
  comm->maker = std::thread(std::move(work));
  if (!comm->blocking) return kInProgress;
  wait_in_group(comm);
  return kSuccess;
}

bool good(const Config* config) {
  return config == nullptr ||
         (config->magic == kConfigMagic &&
          (config->blocking == kUndefined || config->blocking == 0 || config->blocking == 1));
}

Result initialise(Comm** out, int size, const UniqueId& id, int rank, const Config* config) {
  if (out == nullptr) return fail(kInvalidArgument, "comm is null");
  *out = nullptr;
  if (size < 1 || rank < 0 || rank >= size)
    return fail(kInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                      ": expected 0 <= rank < nranks");
  if (!good(config)) return fail(kInvalidArgument, "the ncclConfig_t was not initialised");
  Comm* comm = *out = make(config, nullptr);
  comm->rank = rank;
  comm->size = size;
  return start(comm, [comm, id] {
    nap("NCCL_RIG_INIT_MS");
    finish(comm, comm->segment.attach(id, comm->rank, comm->size, comm->device));
    log("communicator of %d ranks, rank %d: %d", comm->size, comm->rank, comm->state.load());
  });
}

// Colours are exchanged at one meeting, at the next the ids that the groups' first ranks made.
Result join_group(Comm* parent, Comm* child, int color, int key) {
  Segment& segment = parent->segment;
  const uint64_t first = parent->controls + 1, second = parent->controls + 2;
  parent->controls += 2;
  Intent mine{};
  mine.root = color;
  mine.datatype = key;
  const std::atomic<bool>* also = child != nullptr ? &child->aborted : nullptr;
  if (const Result result = segment.meet(kControl, first, mine, also); result != kSuccess)
    return result;
  std::vector<std::pair<int, int>> members;  // key, rank in the parent
  for (int rank = 0; rank < segment.size(); rank++) {
    const Intent& its = segment.intent(kControl, first, rank);
    if (color >= 0 && its.root == color) members.emplace_back(its.datatype, rank);
  }
  std::sort(members.begin(), members.end());
  const bool leads = !members.empty() && members[0].second == parent->rank;
  if (leads) {
    if (const Result result = Segment::create(&mine.id); result != kSuccess) return result;
  }
  if (const Result result = segment.meet(kControl, second, mine, also); result != kSuccess)
    return result;
  if (child == nullptr) return kSuccess;
  const auto me = std::find_if(members.begin(), members.end(), [parent](const auto& member) {
    return member.second == parent->rank;
  });
  child->rank = static_cast<int>(me - members.begin());
  child->size = static_cast<int>(members.size());
  const UniqueId id = segment.intent(kControl, second, members[0].second).id;
  return child->segment.attach(id, child->rank, child->size, child->device);
}

// Until all that was given has been done; once aborted, until what is running has noticed.
void wait_for_work(Comm* comm) {
  std::unique_lock<std::mutex> guard(comm->lock);
  comm->changed.wait(
      guard, [comm] { return comm->done == comm->given || (comm->aborted && !comm->running); });
}

void interrupt(Comm* comm) {
  {
    std::lock_guard<std::mutex> guard(comm->lock);
    comm->aborted = true;
  }
  comm->segment.stop();
  comm->changed.notify_all();
}

// The memory stays: a few hundred bytes, for whoever asks for an error afterwards.
void drop(Comm* comm, bool abort) {
  if (abort || comm->state == kInProgress) interrupt(comm);
  std::call_once(comm->dropped, [comm] {
    if (comm->maker.joinable()) comm->maker.join();
    wait_for_work(comm);
    comm->segment.leave(!comm->aborted);
    interrupt(comm);
    comm->segment.close();
  });
  write_counters();
}

}  // namespace

size_t size_of(int datatype) {
  constexpr size_t kSizes[kDataTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[datatype];
}

Result fail(Result result, const std::string& text) {
  t_error = text;
  {
    std::lock_guard<std::mutex> guard(*g_lock);
    *g_error = text;
  }
  log("error %d: %s", result, text.c_str());
  return result;
}

void log(const char* format, ...) {
  static const bool wanted = number_of("NCCL_RIG_LOG", 0) != 0;
  if (!wanted) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "nccl rig, process %d: %s\n", static_cast<int>(getpid()), text);
}

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != 0 ? std::atoi(text) : otherwise;
}

Result Comm::failed(Result result, const std::string& text) {
  error = text;
  return fail(result, text);
}

Result Comm::usable() {
  const int now = state;
  if (aborted) return failed(kInvalidUsage, "the communicator was aborted or destroyed");
  if (now == kInProgress) {
    return failed(kInvalidArgument,
                  "the communicator was used before its last call had returned ncclSuccess");
  }
  return now == kSuccess ? kSuccess : fail(static_cast<Result>(now), error);
}

API Result ncclGetUniqueId(UniqueId* id) {
  count(kGetUniqueId);
  return id == nullptr ? fail(kInvalidArgument, "uniqueId is null") : Segment::create(id);
}

API Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank,
                                  const Config* config) {
  count(kInitRankConfig);
  return initialise(comm, size, id, rank, config);
}

API Result ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) {
  count(kInitRank);
  return initialise(comm, size, id, rank, nullptr);
}

// One id is enough for a meeting; the others only share NCCL's own load.
API Result ncclCommInitRankScalable(Comm** comm, int size, int rank, int ids, const UniqueId* all,
                                    const Config* config) {
  count(kInitRankScalable);
  if (ids < 1 || ids > size || all == nullptr)
    return fail(kInvalidArgument, std::to_string(ids) + " ids for " + std::to_string(size) +
                                      " ranks: expected 1 to nranks");
  return initialise(comm, size, all[0], rank, config);
}

API Result ncclCommInitAll(Comm**, int, const int*) {
  return fail(kInvalidUsage, "ncclCommInitAll: the rig has one rank a process");
}

API Result ncclCommSplit(Comm* parent, int color, int key, Comm** out, const Config* config) {
  count(kSplit);
  if (color == -1) count(kSplitNoColor);
  if (parent == nullptr || out == nullptr) return fail(kInvalidArgument, "comm is null");
  *out = nullptr;
  if (const Result result = parent->usable(); result != kSuccess) return result;
  if (color < -1 || !good(config))
    return parent->failed(kInvalidArgument, "split with colour " + std::to_string(color) +
                                                ": expected -1 or more, and a good config");
  if (in_group()) return parent->failed(kInvalidUsage, "the rig splits outside of groups only");
  Comm* child = color < 0 ? nullptr : * out = make(config, parent);
  const auto work = [parent, child, color, key] {
    nap("NCCL_RIG_SPLIT_MS");
    const Result result = join_group(parent, child, color, key);
    if (child != nullptr) finish(child, result);
    if (child == nullptr) write_counters();
    return result;
  };
  if (parent->blocking && (child == nullptr || child->blocking)) return work();
  // A parent that does not block is busy until its child has come up.
  if (parent->maker.joinable()) parent->maker.join();
  parent->state = kInProgress;
  parent->maker = std::thread([parent, work] { parent->state = work(); });
  return kInProgress;
}

API Result ncclCommFinalize(Comm* comm) {
  count(kFinalize);
  if (comm == nullptr) return fail(kInvalidArgument, "comm is null");
  if (const Result result = comm->usable(); result != kSuccess) return result;
  if (comm->blocking) {
    wait_for_work(comm);
    return kSuccess;
  }
  if (comm->maker.joinable()) comm->maker.join();
  comm->state = kInProgress;
  comm->maker = std::thread([comm] {
    wait_for_work(comm);
    comm->state = kSuccess;
  });
  return kInProgress;
}

API Result ncclCommDestroy(Comm* comm) {
  count(kDestroy);
  if (comm == nullptr) return kSuccess;
  if (comm->maker.joinable() && comm->segment.size() > 0 && comm->state == kInProgress)
    comm->maker.join();  // a finalize that is under way
  drop(comm, false);
  return kSuccess;
}

API Result ncclCommAbort(Comm* comm) {
  count(kAbort);
  if (comm != nullptr) drop(comm, true);
  return kSuccess;
}

API Result ncclCommGetAsyncError(Comm* comm, Result* error) {
  if (comm == nullptr || error == nullptr) return fail(kInvalidArgument, "comm is null");
  *error = static_cast<Result>(comm->state.load());
  return kSuccess;
}

API const char* ncclGetLastError(Comm*) {
  thread_local std::string copy;
  std::lock_guard<std::mutex> guard(*g_lock);
  copy = *g_error;
  return copy.c_str();
}

API const char* ncclGetErrorString(Result result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result >= 0 && result < 8 ? kTexts[result] : "unknown result code";
}

API Result ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

API Result ncclCommCount(Comm* comm, int* size) {
  *size = comm->size;
  return kSuccess;
}

API Result ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}

API Result ncclRedOpCreatePreMulSum(int* reduction, const void* factor, int datatype, int,
                                    Comm* comm) {
  if (const Result result = comm->usable(); result != kSuccess) return result;
  *reduction = comm->next_reduction++;
  comm->scales[*reduction] = scalar(datatype, factor);
  return kSuccess;
}

API Result ncclRedOpDestroy(int reduction, Comm* comm) {
  comm->scales.erase(reduction);
  return kSuccess;
}

API Result ncclMemAlloc(void** address, size_t size) {
  return cudaMalloc(address, size) != 0 ? kCudaError : kSuccess;
}

API Result ncclMemFree(void* address) { return cudaFree(address) != 0 ? kCudaError : kSuccess; }

// Registration only makes the real thing faster.
API Result ncclCommRegister(Comm*, void* address, size_t, void** handle) {
  *handle = address;
  return kSuccess;
}

API Result ncclCommDeregister(Comm*, void*) { return kSuccess; }

// What torch links and the rig does not have.
#define MISSING(name) \
  API Result name() { return fail(kInvalidUsage, #name " does not exist in the rig"); }
MISSING(ncclCommGetUniqueId)
MISSING(ncclCommGrow)
MISSING(ncclCommMemStats)
MISSING(ncclCommResume)
MISSING(ncclCommRevoke)
MISSING(ncclCommShrink)
MISSING(ncclCommSuspend)
MISSING(ncclCommWindowDeregister)
MISSING(ncclCommWindowRegister)
MISSING(ncclDevCommCreate)
MISSING(ncclDevCommDestroy)
MISSING(ncclGetLsaMultimemDevicePointer)
MISSING(ncclGetPeerDevicePointer)
MISSING(ncclPutSignal)
MISSING(ncclSignal)
MISSING(ncclWaitSignal)
MISSING(ncclWinGetUserPtr)
