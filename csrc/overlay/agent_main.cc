// commkit-agent: started by the first local rank, with the listening Unix socket as descriptor 3.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "net/version.h"
#include "overlay/agent.h"
#include "overlay/spawn.h"

namespace {

// The starter waits for this process, so a child goes on, as nobody's child: no zombie in the rank,
// and no agent that dies with its launcher's process group (it has a session of its own already).
void detach() {
  // What we had to say, the starter has read; it sees the end of our standard error.
  int nothing = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nothing < 0) throw std::runtime_error(std::string("/dev/null: ") + std::strerror(errno));
  pid_t child = fork();
  if (child < 0)
    throw std::runtime_error(std::string("fork: ") + std::strerror(errno) +
                             " (the limit of processes, ulimit -u?)");
  if (child > 0) _exit(0);
  dup2(nothing, STDERR_FILENO);
  close(nothing);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--version") == 0) {
    std::printf("commkit-agent %s, protocol %d\n", commkit::release(), commkit::protocol_version());
    return 0;
  }
  if (argc != 2 || std::strcmp(argv[1], "--serve") != 0 ||
      fcntl(commkit::kAgentListener, F_GETFD) < 0) {
    std::fprintf(stderr, "commkit-agent is started by a rank; see `commkit agents`\n");
    return 2;
  }
  commkit::close_from(commkit::kAgentListener + 1);
  fcntl(commkit::kAgentListener, F_SETFD, FD_CLOEXEC);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a log that may not grow is no reason to die
  prctl(PR_SET_NAME, "commkit-agent");
  if (chdir("/") != 0) return 1;
  // Never freed: a resolver's thread may still have something to say when everything else is over.
  auto* loop = new commkit::Loop;
  commkit::Agent* agent = nullptr;
  try {
    // Before the starter is told that all is well.
    agent = new commkit::Agent(*loop, commkit::kAgentListener);
    detach();
    loop->run();
  } catch (const std::exception& error) {
    if (agent != nullptr) agent->log(std::string("ended by an error: ") + error.what());
    std::fprintf(stderr, "%s\n", error.what());
    _exit(1);
  }
  _exit(0);
}
