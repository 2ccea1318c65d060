// A failed system call: which call, about what (a peer, a descriptor, a path), which errno.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace commkit {

class SystemError : public std::runtime_error {
 public:
  SystemError(const std::string& call, const std::string& about, int code)
      : std::runtime_error(call + " of " + about + ": " + std::strerror(code) + " (errno " +
                           std::to_string(code) + ")"),
        code_(code) {}
  // The errno.
  int code() const { return code_; }

 private:
  int code_;
};

}  // namespace commkit
