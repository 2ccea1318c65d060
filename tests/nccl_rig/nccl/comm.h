// A communicator of one rank.
#ifndef NCCL_RIG_NCCL_COMM_H_
#define NCCL_RIG_NCCL_COMM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "segment.h"
#include "types.h"

struct ncclComm {
  Segment segment;
  int rank = -1, size = 0;
  std::string device;  // host and GPU
  bool blocking = true;
  std::atomic<int> state{kInProgress};
  std::atomic<bool> aborted{false};
  std::thread maker;             // of a non-blocking call
  uint64_t controls = 0;         // meetings of this communicator's control lane
  std::map<int, double> scales;  // of reductions that multiply first
  int next_reduction = 5;

  // Work takes turns, in the order in which it was given, whatever its streams.
  std::mutex lock;
  std::condition_variable changed;
  uint64_t given = 0, done = 0, meetings = 0;
  bool running = false;

  std::string error;
  // Only once: a torn-down communicator may still be asked for its error.
  std::once_flag dropped;

  Result failed(Result result, const std::string& text);
  // kSuccess where operations can be given.
  Result usable();
};

using Comm = ncclComm;

// --- group.cc ---
// Whether this thread is between ncclGroupStart and ncclGroupEnd.
bool in_group();
// Makes the end of the group wait for this communicator to come up.
void wait_in_group(Comm* comm);

#endif  // NCCL_RIG_NCCL_COMM_H_
