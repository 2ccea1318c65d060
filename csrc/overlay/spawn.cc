#include "overlay/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

extern char** environ;

namespace commkit {

namespace {

constexpr int kLocalBacklog = 4096;

socklen_t abstract_name(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

void close_from(int first) {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, static_cast<unsigned>(first), ~0u, 0u) == 0) return;
#endif
  long most = sysconf(_SC_OPEN_MAX);
  for (int fd = first; fd < most; ++fd) close(fd);
}

int connect_agent(const std::string& name) {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error(std::string("socket: ") + std::strerror(errno));
  sockaddr_un address;
  socklen_t size = abstract_name(address, name);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) < 0) {
    close(fd);
    return -1;
  }
  return fd;
}

bool start_agent(const std::string& name, const std::string& program) {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw std::runtime_error(std::string("socket: ") + std::strerror(errno));
  sockaddr_un address;
  socklen_t size = abstract_name(address, name);
  // The name is the lock: whoever binds it starts the agent, and it is free again when the agent is
  // gone.
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) < 0) {
    int why = errno;
    close(fd);
    if (why == EADDRINUSE) return false;
    throw std::runtime_error("cannot bind the agent's socket @" + name + ": " + std::strerror(why));
  }
  if (listen(fd, kLocalBacklog) < 0) {
    close(fd);
    throw std::runtime_error(std::string("listen: ") + std::strerror(errno));
  }
  int high = fcntl(fd, F_DUPFD_CLOEXEC, 10);  // dup2 onto itself would keep close-on-exec
  int failed = errno;
  close(fd);
  if (high < 0)
    throw std::runtime_error(std::string("cannot duplicate a descriptor: ") +
                             std::strerror(failed));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  // Nobody waits for the end of an output that an agent holds.
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, high, kAgentListener);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(
      &attributes,
      static_cast<short>(POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF));
  std::string program_copy = program, serve = "--serve";
  char* argv[] = {program_copy.data(), serve.data(), nullptr};
  pid_t pid = 0;
  int error = posix_spawn(&pid, program.c_str(), &actions, &attributes, argv, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(high);
  if (error != 0) throw std::runtime_error("cannot start " + program + ": " + std::strerror(error));
  int status = 0;
  // ECHILD: this process ignores SIGCHLD, the kernel has cleaned up.
  pid_t waited;
  while ((waited = waitpid(pid, &status, 0)) < 0 && errno == EINTR) {
  }
  if (waited == pid && status != 0) {
    throw std::runtime_error(program + " ended at once: " +
                             (WIFEXITED(status) ? "exit code " + std::to_string(WEXITSTATUS(status))
                                                : "signal " + std::to_string(WTERMSIG(status))));
  }
  return true;
}

}  // namespace commkit
