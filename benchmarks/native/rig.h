// What the native benchmark programs share: arguments, worker processes that start together,
// counters of the kernel's TCP.
#pragma once

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "net/loop.h"

namespace rig {

struct Shared {
  std::atomic<int> ready{0};
  std::atomic<int> go{0};
  std::atomic<int> done{0};
  std::atomic<int> received{0};
  std::atomic<int> finish{0};
};

inline Shared* share() {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) Shared;
}

// name=value arguments.
class Arguments {
 public:
  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const char* equals = std::strchr(argv[i], '=');
      if (equals == nullptr) {
        std::fprintf(stderr, "%s: expected name=value\n", argv[i]);
        std::exit(2);
      }
      values_[std::string(argv[i], static_cast<size_t>(equals - argv[i]))] = equals + 1;
    }
  }
  double number(const std::string& name, double fallback) const {
    auto it = values_.find(name);
    return it == values_.end() ? fallback : std::atof(it->second.c_str());
  }
  int whole(const std::string& name, int fallback) const {
    return static_cast<int>(number(name, fallback));
  }
  std::string text(const std::string& name, const std::string& fallback) const {
    auto it = values_.find(name);
    return it == values_.end() ? fallback : it->second;
  }

 private:
  std::map<std::string, std::string> values_;
};

inline void raise_file_limit() {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

// A network namespace of this run's own: nobody else's sockets are in its counters, and 64,000
// ports are free where every simulated host listens.  False where that is not allowed.
inline bool isolate() {
  if (unshare(CLONE_NEWNET) < 0) return false;
  int fd = socket(AF_INET, SOCK_DGRAM, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  bool up = ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  close(fd);
  std::ofstream("/proc/sys/net/ipv4/ip_local_port_range") << "1024 65535";
  return up;
}

// Forks `body`; a worker dies with its parent.
inline pid_t worker(const std::function<void()>& body) {
  pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    _exit(0);
  }
  return pid;
}

// Waits until the counter reaches the number; false at the deadline or when a worker has died.
inline bool await(const std::atomic<int>& counter, int number, double deadline,
                  const std::vector<pid_t>& workers) {
  while (counter.load() < number) {
    if (commkit::now() > deadline) return false;
    for (pid_t pid : workers) {
      siginfo_t info{};
      if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid == pid)
        return false;
    }
    usleep(2000);
  }
  return true;
}

inline void end(const std::vector<pid_t>& workers) {
  for (pid_t pid : workers) kill(pid, SIGKILL);
  for (pid_t pid : workers) waitpid(pid, nullptr, 0);
}

// /proc/net/netstat, TcpExt.
inline std::map<std::string, uint64_t> netstat() {
  std::ifstream in("/proc/net/netstat");
  std::string names, values;
  std::map<std::string, uint64_t> out;
  while (std::getline(in, names) && std::getline(in, values)) {
    std::istringstream n(names), v(values);
    std::string name, value;
    while (n >> name && v >> value) out[name] = std::strtoull(value.c_str(), nullptr, 10);
  }
  return out;
}

inline long resident_mib() {
  std::ifstream in("/proc/self/status");
  std::string word;
  while (in >> word) {
    if (word == "VmHWM:") {
      long kib = 0;
      in >> kib;
      return kib / 1024;
    }
  }
  return 0;
}

}  // namespace rig
