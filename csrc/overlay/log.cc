#include "overlay/log.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace commkit {

namespace {

constexpr time_t kKeepSeconds = 7 * 24 * 3600;

// Agents come and go with every job: without this their logs would stay for ever.
void remove_old(const std::string& directory) {
  DIR* dir = opendir(directory.c_str());
  if (dir == nullptr) return;
  while (dirent* entry = readdir(dir)) {
    std::string name = entry->d_name;
    if (name.rfind("agent-", 0) != 0 || name.find(".log") == std::string::npos) continue;
    std::string path = directory + "/" + name;
    struct stat info{};
    if (lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == getuid() &&
        time(nullptr) - info.st_mtime > kKeepSeconds) {
      unlink(path.c_str());
    }
  }
  closedir(dir);
}

}  // namespace

Log::~Log() {
  if (file_ != nullptr) std::fclose(file_);
}

std::string Log::open(const std::string& directory, const std::string& name) {
  if (file_ != nullptr) return "";
  if (mkdir(directory.c_str(), 0700) < 0 && errno != EEXIST) {
    return "mkdir " + directory + ": " + std::strerror(errno);
  }
  struct stat info{};
  if (lstat(directory.c_str(), &info) < 0 || !S_ISDIR(info.st_mode) || info.st_uid != getuid()) {
    return directory + " is not a directory of this user; set COMMKIT_LOG_DIR";
  }
  remove_old(directory);
  path_ = directory + "/agent-" + name + "-" + std::to_string(getpid()) + ".log";
  int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    std::string why = "open " + path_ + ": " + std::strerror(errno);
    path_.clear();
    return why;
  }
  file_ = fdopen(fd, "a");
  std::fwrite(early_.data(), 1, early_.size(), file_);
  std::fflush(file_);
  early_.clear();
  return "";
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
