// How often each call was made in this process: NCCL_RIG_COUNTERS and ncclRigCounters.
#ifndef NCCL_RIG_NCCL_COUNTERS_H_
#define NCCL_RIG_NCCL_COUNTERS_H_

enum Call : int {
  kGetUniqueId,
  kInitRank,
  kInitRankConfig,
  kInitRankScalable,
  kSplit,
  kSplitNoColor,
  kShrink,
  kCreated,
  kFailed,
  kFinalize,
  kDestroy,
  kAbort,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kCalls,
};

void count(Call call);

// Writes the file again where NCCL_RIG_COUNTERS names a directory.
void write_counters();

#endif  // NCCL_RIG_NCCL_COUNTERS_H_
