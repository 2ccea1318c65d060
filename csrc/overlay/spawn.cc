#include "overlay/spawn.h"

#include <fcntl.h>
#include <poll.h>
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

#include "net/loop.h"

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

std::runtime_error no_socket() {
  return std::runtime_error(std::string("socket: ") + std::strerror(errno) +
                            (errno == EMFILE ? " (the limit of open files, ulimit -n)" : ""));
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
  // Else connect() would wait, for as long as it takes, for an agent whose queue is full.
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw no_socket();
  sockaddr_un address;
  socklen_t size = abstract_name(address, name);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) < 0) {
    close(fd);
    return -1;
  }
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  return fd;
}

namespace {

// The agent that is starting: its process, and what it has to say if it cannot.
struct Starting {
  pid_t pid = 0;
  int words = -1;

  ~Starting() {
    if (words >= 0) close(words);
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  // Its exit status once it has ended, which is when the agent is ready or has failed.
  int wait(const std::string& program, double deadline, const std::function<void()>& tick) {
    int status = 0;
    for (double began = now(), ticked = began;;) {
      pid_t waited = waitpid(pid, &status, WNOHANG);
      // ECHILD: this process ignores SIGCHLD, the kernel has cleaned up.
      if (waited == pid || (waited < 0 && errno != EINTR)) {
        pid = 0;
        return waited < 0 ? 0 : status;
      }
      if (now() > deadline) {
        throw std::runtime_error(program + " was not ready after " +
                                 std::to_string(static_cast<int>(now() - began)) +
                                 " s; is its file system, or this host, stuck?");
      }
      // Its words end when it does.
      pollfd ended{words, 0, 0};
      poll(&ended, 1, 100);
      if (tick && now() - ticked > 0.05) {
        tick();
        ticked = now();
      }
      if (ended.revents != 0) usleep(100);
    }
  }

  std::string last_words() const {
    char buffer[512];
    ssize_t n = read(words, buffer, sizeof buffer);
    std::string text(buffer, n > 0 ? static_cast<size_t>(n) : 0);
    return text.substr(0, text.find('\n'));
  }
};

}  // namespace

bool start_agent(const std::string& name, const std::string& program, double deadline,
                 const std::function<void()>& tick) {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw no_socket();
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
  int words[2];
  if (pipe2(words, O_CLOEXEC | O_NONBLOCK) < 0) {
    int why = errno;
    close(high);
    throw std::runtime_error(std::string("pipe: ") + std::strerror(why));
  }
  Starting starting;
  starting.words = words[0];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  // Nobody waits for the end of an output that an agent holds.
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  // Until it is ready; then it lets go of that one, too.
  posix_spawn_file_actions_adddup2(&actions, words[1], 2);
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
  int error = posix_spawn(&starting.pid, program.c_str(), &actions, &attributes, argv, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(high);
  close(words[1]);
  if (error != 0) {
    starting.pid = 0;
    throw std::runtime_error("cannot start " + program + ": " + std::strerror(error) +
                             (error == EAGAIN ? " (the limit of processes, ulimit -u?)" : ""));
  }
  int status = starting.wait(program, deadline, tick);
  if (status != 0) {
    std::string said = starting.last_words();
    throw std::runtime_error(program + " ended at once: " +
                             (WIFEXITED(status) ? "exit code " + std::to_string(WEXITSTATUS(status))
                                                : "signal " + std::to_string(WTERMSIG(status))) +
                             (said.empty() ? "" : ": " + said));
  }
  return true;
}

}  // namespace commkit
