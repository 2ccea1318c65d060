// The agent's log file: one line an event, flushed at once, seconds since the agent's start.
#pragma once

#include <cstdio>
#include <string>

namespace commkit {

class Log {
 public:
  ~Log();
  // Where the agent of that name and pid writes.
  static std::string path(const std::string& directory, const std::string& agent,
                          const std::string& pid);
  // Keeps what was written before in memory; an unusable directory is not fatal, the text tells.
  std::string open(const std::string& directory, const std::string& agent);
  void write(const std::string& text);
  const std::string& path() const { return path_; }

 private:
  std::FILE* file_ = nullptr;
  std::string path_;
  std::string early_;
};

}  // namespace commkit
