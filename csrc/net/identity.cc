#include "net/identity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "net/system_error.h"

namespace commkit {
namespace {

constexpr const char* kAdvice = " (set COMMKIT_HOST_ID if this host cannot provide it)";

std::string first_line(const char* path) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw SystemError("open", std::string(path) + kAdvice, errno);
  char buffer[128];
  ssize_t n;
  do {
    n = read(fd, buffer, sizeof buffer);
  } while (n < 0 && errno == EINTR);
  int code = errno;
  close(fd);
  if (n < 0) throw SystemError("read", std::string(path) + kAdvice, code);
  std::string line(buffer, static_cast<size_t>(n));
  return line.substr(0, line.find('\n'));
}

std::string inode(const char* path) {
  struct stat status{};
  if (stat(path, &status) < 0) throw SystemError("stat", std::string(path) + kAdvice, errno);
  return std::to_string(status.st_ino);
}

}  // namespace

HostIdentity host_identity() {
  HostIdentity id;
  id.boot_id = first_line("/proc/sys/kernel/random/boot_id");
  id.netns = inode("/proc/self/ns/net");
  id.mntns = inode("/proc/self/ns/mnt");
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) < 0) {
    throw SystemError("gethostname", "this host", errno);
  }
  id.hostname = name;
  return id;
}

}  // namespace commkit
