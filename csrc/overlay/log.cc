#include "overlay/log.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace commkit {

namespace {

constexpr time_t kKeepSeconds = 7 * 24 * 3600;

// agent-<16 hexadecimal digits>-<pid>.log, as open() makes them: nobody else's file is touched.
bool is_log(const std::string& name) {
  const std::string start = "agent-", end = ".log";
  size_t dash = start.size() + 16;
  if (name.size() <= dash + 1 + end.size() || name.compare(0, start.size(), start) != 0)
    return false;
  if (name.compare(name.size() - end.size(), end.size(), end) != 0 || name[dash] != '-')
    return false;
  std::string hash = name.substr(start.size(), 16);
  std::string pid = name.substr(dash + 1, name.size() - end.size() - dash - 1);
  return hash.find_first_not_of("0123456789abcdef") == std::string::npos &&
         pid.find_first_not_of("0123456789") == std::string::npos;
}

// An agent locks its log for as long as it lives: a job may run, and say nothing, for weeks.
bool in_use(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return true;
  bool locked = flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
  close(fd);
  return locked;
}

// Agents come and go with every job: without this their logs would stay for ever.
void remove_old(const std::string& directory) {
  DIR* dir = opendir(directory.c_str());
  if (dir == nullptr) return;
  while (dirent* entry = readdir(dir)) {
    std::string name = entry->d_name;
    if (!is_log(name)) continue;
    std::string path = directory + "/" + name;
    struct stat info{};
    if (lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == getuid() &&
        time(nullptr) - info.st_mtime > kKeepSeconds && !in_use(path)) {
      unlink(path.c_str());
    }
  }
  closedir(dir);
}

}  // namespace

Log::~Log() {
  if (file_ != nullptr) std::fclose(file_);
}

std::string Log::path(const std::string& directory, const std::string& agent,
                      const std::string& pid) {
  return directory + "/agent-" + agent.substr(agent.rfind('-') + 1) + "-" + pid + ".log";
}

std::string Log::open(const std::string& directory, const std::string& agent) {
  if (file_ != nullptr) return "";
  if (mkdir(directory.c_str(), 0700) < 0 && errno != EEXIST) {
    return "mkdir " + directory + ": " + std::strerror(errno);
  }
  struct stat info{};
  if (lstat(directory.c_str(), &info) < 0 || !S_ISDIR(info.st_mode) || info.st_uid != getuid()) {
    return directory + " is not a directory of this user; set COMMKIT_LOG_DIR";
  }
  remove_old(directory);
  path_ = path(directory, agent, std::to_string(getpid()));
  int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    std::string why = "open " + path_ + ": " + std::strerror(errno);
    path_.clear();
    return why;
  }
  flock(fd, LOCK_EX | LOCK_NB);  // where a file system has no locks, age alone decides
  file_ = fdopen(fd, "a");
  bool written = std::fwrite(early_.data(), 1, early_.size(), file_) == early_.size() &&
                 std::fflush(file_) == 0;
  std::string why = written ? "" : "write " + path_ + ": " + std::strerror(errno);
  early_.clear();
  return why;  // a full disk may have room again later
}

void Log::write(const std::string& text) {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  tm parts{};
  gmtime_r(&t.tv_sec, &parts);
  char stamp[64];
  size_t n = strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(stamp + n, sizeof stamp - n, ".%03ldZ ", t.tv_nsec / 1000000);
  std::string line = stamp + text + "\n";
  if (file_ == nullptr) {
    if (early_.size() < 65536) early_ += line;
    return;
  }
  std::fwrite(line.data(), 1, line.size(), file_);
  std::fflush(file_);
}

}  // namespace commkit
