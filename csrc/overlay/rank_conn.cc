#include "overlay/rank_conn.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace commkit {

namespace {

constexpr int kSoPeerPidfd = 77;  // Linux 6.5

// Linux 6.15 keeps the exit code behind a pidfd after the parent has reaped the process.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroupid;
  uint32_t pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  int32_t exit_code;
};
constexpr uint64_t kPidfdInfoExit = 1u << 3;
#define COMMKIT_PIDFD_GET_INFO _IOWR(0xFF, 11, PidfdInfo)

std::string phrase(int status) {
  if (WIFSIGNALED(status)) {
    int signal = WTERMSIG(status);
    return "was killed by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
  }
  int code = WEXITSTATUS(status);
  return code == 0 ? "" : "exited with code " + std::to_string(code);
}

// The last field of /proc/PID/stat, readable while the parent has not reaped the process.
bool zombie_status(int pid, int& status) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(in, text);
  size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size() || text[end + 2] != 'Z') return false;
  size_t last = text.find_last_of(' ');
  status = std::atoi(text.c_str() + last + 1);
  return true;
}

}  // namespace

int peer_pidfd(int unix_fd, int pid) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (getsockopt(unix_fd, SOL_SOCKET, kSoPeerPidfd, &fd, &size) == 0) return fd;
  if (pid <= 0) return -1;  // the peer lives in a pid namespace that we cannot see
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

std::string how_it_ended(int pidfd, int pid) {
  // Between a process's end, its being a zombie and its being reaped neither source may know for a
  // moment.
  for (int round = 0; round < 5; ++round) {
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (pidfd >= 0 && ioctl(pidfd, COMMKIT_PIDFD_GET_INFO, &info) == 0 &&
        (info.mask & kPidfdInfoExit) != 0) {
      return phrase(info.exit_code);
    }
    int status = 0;
    if (pid > 0 && zombie_status(pid, status)) return phrase(status);
    usleep(500);
  }
  return "?";
}

}  // namespace commkit
