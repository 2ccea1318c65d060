// Collectives and point to point: checked and collected here, done in the threads of streams.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "arithmetic.h"
#include "comm.h"
#include "counters.h"

extern "C" int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument);

namespace {

struct Operation {
  Intent intent;
  const void* from;
  void* to;
  size_t given, taken;  // bytes of `from` and of `to`
  int peer;             // of point to point
  uint64_t meeting;
};

// What one group gives to one communicator.
struct Work {
  Comm* comm;
  void* stream;
  uint64_t turn;
  std::vector<Operation> operations;
};

thread_local int t_depth;
thread_local std::vector<Work> t_work;
thread_local std::vector<Comm*> t_starting;

bool point_to_point(const Operation& operation) {
  return operation.intent.call == kSend || operation.intent.call == kRecv;
}

std::string described(const Intent& intent) {
  return "call " + std::to_string(intent.call) + " count " + std::to_string(intent.count) +
         " type " + std::to_string(intent.datatype) + " reduction " +
         std::to_string(intent.reduction) + " root " + std::to_string(intent.root);
}

bool same(const Intent& one, const Intent& other) {
  return one.call == other.call && one.count == other.count && one.datatype == other.datatype &&
         one.reduction == other.reduction && one.root == other.root;
}

// Where NCCL would hang or deliver nonsense, the rig says who differs.
Result compare(Comm* comm, const Operation& operation) {
  const Intent& first = comm->segment.intent(kData, operation.meeting, 0);
  for (int rank = 1; rank < comm->size; rank++) {
    const Intent& its = comm->segment.intent(kData, operation.meeting, rank);
    if (!same(first, its))
      return comm->failed(kInvalidUsage, "ranks disagree: rank 0 " + described(first) + ", rank " +
                                             std::to_string(rank) + " " + described(its));
  }
  return kSuccess;
}

bool deliver(Comm* comm, const Operation& operation) {
  const Intent& intent = operation.intent;
  const Segment& segment = comm->segment;
  const size_t element = size_of(intent.datatype), bytes = intent.count * element;
  const int rank = comm->rank;
  char* to = static_cast<char*>(operation.to);
  const auto theirs = [&](int peer, size_t offset, char* where) {
    return segment.read(operation.meeting, peer, offset, bytes, where);
  };
  const auto from_each = [&](size_t offset) {
    for (int peer = 0; peer < comm->size; peer++) {
      if (!theirs(peer, offset, to + static_cast<size_t>(peer) * bytes)) return false;
    }
    return true;
  };
  const bool root = rank == intent.root;
  switch (intent.call) {
    case kBroadcast:
      return theirs(intent.root, 0, to);
    case kScatter:
      return theirs(intent.root, static_cast<size_t>(rank) * bytes, to);
    case kAllGather:
      return from_each(0);
    case kGather:
      return !root || from_each(0);
    case kAllToAll:
      return from_each(static_cast<size_t>(rank) * bytes);
    case kReduce:
      if (!root) return true;
      break;
    default:
      break;
  }
  std::vector<double> scales;
  for (int peer = 0; peer < comm->size; peer++)
    scales.push_back(segment.intent(kData, operation.meeting, peer).scale);
  const size_t begin = intent.call == kReduceScatter ? intent.count * static_cast<size_t>(rank) : 0;
  const auto read = [&](int peer, size_t first, size_t count, void* where) {
    return segment.read(operation.meeting, peer, first * element, count * element, where);
  };
  return reduce(intent.datatype, intent.reduction, comm->size, scales.data(), begin, intent.count,
                read, to);
}

Result collective(Comm* comm, const Operation& operation) {
  Segment& segment = comm->segment;
  if (!segment.write(operation.meeting, operation.from, operation.given))
    return comm->failed(kSystemError, "pwrite to the segment failed");
  Result result = segment.meet(kData, operation.meeting, operation.intent);
  if (result != kSuccess) return comm->failed(result, segment.why());
  if ((result = compare(comm, operation)) != kSuccess) return result;
  if (!deliver(comm, operation))
    return comm->failed(kInternalError, "the rig cannot do " + described(operation.intent));
  return kSuccess;
}

// All that a group sends and receives goes on at once.
Result exchange(Comm* comm, const std::vector<Operation>& operations) {
  Segment& segment = comm->segment;
  std::vector<std::pair<int, uint32_t>> posted;
  for (const Operation& operation : operations) {
    uint32_t number = 0;
    if (operation.intent.call != kSend) continue;
    const Result result = segment.post(operation.peer, operation.from, operation.given, &number);
    if (result != kSuccess) return result;
    posted.emplace_back(operation.peer, number);
  }
  for (const Operation& operation : operations) {
    if (operation.intent.call != kRecv) continue;
    const Result result = segment.take(operation.peer, operation.to, operation.taken);
    if (result != kSuccess) return result;
  }
  for (const auto& [peer, number] : posted) {
    if (const Result result = segment.taken(peer, number); result != kSuccess) return result;
  }
  return kSuccess;
}

Result perform(Work* work) {
  std::vector<Operation> messages;
  for (const Operation& operation : work->operations) {
    if (point_to_point(operation)) {
      messages.push_back(operation);
    } else if (const Result result = collective(work->comm, operation); result != kSuccess) {
      return result;
    }
  }
  const Result result = exchange(work->comm, messages);
  return result == kSuccess ? result : work->comm->failed(result, work->comm->segment.why());
}

// In a stream's thread.  As a kernel does, it stays where it is after an error until the
// communicator is aborted; ncclCommGetAsyncError tells of it.
void run(void* argument) {
  auto* work = static_cast<Work*>(argument);
  Comm* comm = work->comm;
  std::unique_lock<std::mutex> guard(comm->lock);
  comm->changed.wait(guard, [&] { return comm->done + 1 == work->turn; });
  if (!comm->aborted) {
    comm->running = true;
    guard.unlock();
    Result result = static_cast<Result>(comm->state.load());
    if (result == kSuccess || result == kInProgress) result = perform(work);
    guard.lock();
    comm->running = false;
    if (result != kSuccess && !comm->aborted) {
      comm->state = result;
      comm->changed.wait(guard, [comm] { return comm->aborted.load(); });
    }
  }
  comm->done++;
  comm->changed.notify_all();
  delete work;
}

Result launch(std::vector<Work> all) {
  for (Work& work : all) {
    Comm* comm = work.comm;
    if (const Result result = comm->usable(); result != kSuccess) return result;
    auto* given = new Work(std::move(work));
    std::lock_guard<std::mutex> guard(comm->lock);
    for (Operation& operation : given->operations) {
      if (!point_to_point(operation)) operation.meeting = ++comm->meetings;
    }
    given->turn = ++comm->given;
    if (cudaLaunchHostFunc(given->stream, run, given) != 0)
      return comm->failed(kCudaError, "cudaLaunchHostFunc failed");
  }
  return kSuccess;
}

// Times 1 or the number of ranks: how much is given and taken.
Result submit(Comm* comm, Call call, const void* from, bool gives, bool gives_all, void* to,
              bool takes, bool takes_all, size_t elements, int datatype, int reduction, int root,
              void* stream) {
  count(call);
  if (comm == nullptr) return fail(kInvalidArgument, "comm is null");
  if (const Result result = comm->usable(); result != kSuccess) return result;
  if (datatype < 0 || datatype >= kDataTypes)
    return comm->failed(kInvalidArgument, "unknown data type " + std::to_string(datatype));
  if (root < 0 || root >= comm->size)
    return comm->failed(kInvalidArgument, "root or peer " + std::to_string(root) + " of " +
                                              std::to_string(comm->size) + " ranks");
  double scale = 1.0;
  if (reduction >= kReductions) {
    const auto found = comm->scales.find(reduction);
    if (found == comm->scales.end())
      return comm->failed(kInvalidArgument, "unknown reduction " + std::to_string(reduction));
    scale = found->second;
    reduction = kSum;
  }
  const size_t bytes = elements * size_of(datatype),
               whole = bytes * static_cast<size_t>(comm->size);
  const size_t given = !gives ? 0 : gives_all ? whole : bytes;
  const size_t taken = !takes ? 0 : takes_all ? whole : bytes;
  if ((given > 0 && from == nullptr) || (taken > 0 && to == nullptr))
    return comm->failed(kInvalidArgument, "a buffer is null");
  const bool message = call == kSend || call == kRecv;
  Operation operation{};
  operation.intent.call = call;
  operation.intent.datatype = datatype;
  operation.intent.reduction = reduction;
  operation.intent.root = message ? 0 : root;
  operation.intent.count = elements;
  operation.intent.scale = scale;
  operation.from = from;
  operation.to = to;
  operation.given = given;
  operation.taken = taken;
  operation.peer = root;
  const auto known = std::find_if(t_work.begin(), t_work.end(),
                                  [comm](const Work& work) { return work.comm == comm; });
  if (known != t_work.end()) {
    known->operations.push_back(operation);
  } else {
    t_work.push_back({comm, stream, 0, {operation}});
  }
  if (t_depth > 0) return kSuccess;
  std::vector<Work> all;
  all.swap(t_work);
  return launch(std::move(all));
}

}  // namespace

bool in_group() { return t_depth > 0; }
void wait_in_group(Comm* comm) { t_starting.push_back(comm); }

API Result ncclGroupStart() {
  t_depth++;
  return kSuccess;
}

API Result ncclGroupEnd() {
  if (t_depth == 0) return fail(kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--t_depth > 0) return kSuccess;
  Result result = kSuccess;
  std::vector<Comm*> starting;
  starting.swap(t_starting);
  for (Comm* comm : starting) {
    comm->maker.join();
    if (comm->state != kSuccess)
      result = fail(static_cast<Result>(comm->state.load()), comm->error);
  }
  std::vector<Work> all;
  all.swap(t_work);
  return result == kSuccess ? launch(std::move(all)) : result;
}

API Result ncclGroupSimulateEnd(void*) {
  t_work.clear();
  t_depth = std::max(0, t_depth - 1);
  return kSuccess;
}

API Result ncclAllReduce(const void* from, void* to, size_t count, int datatype, int reduction,
                         Comm* comm, void* stream) {
  return submit(comm, kAllReduce, from, true, false, to, true, false, count, datatype, reduction, 0,
                stream);
}

API Result ncclReduce(const void* from, void* to, size_t count, int datatype, int reduction,
                      int root, Comm* comm, void* stream) {
  const bool takes = comm != nullptr && comm->rank == root;
  return submit(comm, kReduce, from, true, false, to, takes, false, count, datatype, reduction,
                root, stream);
}

API Result ncclBroadcast(const void* from, void* to, size_t count, int datatype, int root,
                         Comm* comm, void* stream) {
  const bool gives = comm != nullptr && comm->rank == root;
  return submit(comm, kBroadcast, from, gives, false, to, true, false, count, datatype, 0, root,
                stream);
}

API Result ncclBcast(void* buffer, size_t count, int datatype, int root, Comm* comm, void* stream) {
  return ncclBroadcast(buffer, buffer, count, datatype, root, comm, stream);
}

API Result ncclAllGather(const void* from, void* to, size_t count, int datatype, Comm* comm,
                         void* stream) {
  return submit(comm, kAllGather, from, true, false, to, true, true, count, datatype, 0, 0, stream);
}

API Result ncclReduceScatter(const void* from, void* to, size_t count, int datatype, int reduction,
                             Comm* comm, void* stream) {
  return submit(comm, kReduceScatter, from, true, true, to, true, false, count, datatype, reduction,
                0, stream);
}

API Result ncclAlltoAll(const void* from, void* to, size_t count, int datatype, Comm* comm,
                        void* stream) {
  return submit(comm, kAllToAll, from, true, true, to, true, true, count, datatype, 0, 0, stream);
}

API Result ncclGather(const void* from, void* to, size_t count, int datatype, int root, Comm* comm,
                      void* stream) {
  const bool takes = comm != nullptr && comm->rank == root;
  return submit(comm, kGather, from, true, false, to, takes, true, count, datatype, 0, root,
                stream);
}

API Result ncclScatter(const void* from, void* to, size_t count, int datatype, int root, Comm* comm,
                       void* stream) {
  const bool gives = comm != nullptr && comm->rank == root;
  return submit(comm, kScatter, from, gives, true, to, true, false, count, datatype, 0, root,
                stream);
}

API Result ncclSend(const void* from, size_t count, int datatype, int peer, Comm* comm,
                    void* stream) {
  return submit(comm, kSend, from, true, false, nullptr, false, false, count, datatype, 0, peer,
                stream);
}

API Result ncclRecv(void* to, size_t count, int datatype, int peer, Comm* comm, void* stream) {
  return submit(comm, kRecv, nullptr, false, false, to, true, false, count, datatype, 0, peer,
                stream);
}
