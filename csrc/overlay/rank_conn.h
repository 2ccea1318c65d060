// A local rank as its agent sees it: the Unix connection, and the process behind it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "net/stream.h"
#include "overlay/config.h"
#include "overlay/rank_set.h"

namespace commkit {

struct RankConn : std::enable_shared_from_this<RankConn> {
  StreamPtr stream;
  std::shared_ptr<const Config> config;
  int rank = -1;
  int local_rank = -1;  // as the launcher says; -1: it does not
  int pid = 0;
  int pidfd = -1;       // readable when the process has ended; -1: only the connection's end tells
  double came = 0;      // when it connected, on the monotonic clock
  double born = 0;      // when its process started, on the monotonic clock
  double deadline = 0;  // of the join, on the monotonic clock
  std::string token;    // begins this rank's keys in the store
  bool joined = false;  // kRankJoin has been read
  bool creating = false;
  bool leaving = false;
  bool left = false;
  bool ended = false;  // the process or the connection is gone
  bool said_exit = false;
  std::string exit_reason;
  std::map<std::string, RankSet> groups;  // connected groups, and their members
  std::map<uint64_t, uint64_t> keys;      // the rank's request id -> the session's
  uint64_t leave_timer = 0;
  double leave_until = 0;  // what it waits for, on the monotonic clock

  bool gone() const { return left || ended; }
};

using RankPtr = std::shared_ptr<RankConn>;

// pidfd of the process at the other end of a Unix connection, or -1.
int peer_pidfd(int unix_fd, int pid);
// How the process behind the pidfd ended: "" for exit code 0, "?" when nobody can tell any more,
// else a phrase such as "was killed by signal 9 (Killed)".
std::string how_it_ended(int pidfd, int pid);

}  // namespace commkit
