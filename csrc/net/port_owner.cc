#include "net/port_owner.h"

#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

namespace commkit {

namespace {

void listening_inodes(const char* table, uint16_t port, std::set<std::string>& inodes) {
  std::ifstream in(table);
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
    fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >>
        timeout >> inode;
    size_t colon = local.rfind(':');
    if (state == "0A" && colon != std::string::npos &&
        std::strtoul(local.c_str() + colon + 1, nullptr, 16) == port) {
      inodes.insert("socket:[" + inode + "]");
    }
  }
}

bool holds(const std::string& pid, const std::set<std::string>& inodes) {
  std::string directory = "/proc/" + pid + "/fd";
  DIR* dir = opendir(directory.c_str());
  if (dir == nullptr) return false;
  bool found = false;
  while (dirent* entry = readdir(dir)) {
    char target[64];
    ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target);
    if (n > 0 && inodes.count(std::string(target, static_cast<size_t>(n))) != 0) {
      found = true;
      break;
    }
  }
  closedir(dir);
  return found;
}

}  // namespace

std::string port_owner(uint16_t port) {
  std::set<std::string> inodes;
  listening_inodes("/proc/net/tcp", port, inodes);
  listening_inodes("/proc/net/tcp6", port, inodes);
  if (inodes.empty()) return "";
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return "";
  std::string owner;
  while (dirent* entry = readdir(proc)) {
    std::string pid = entry->d_name;
    if (pid.find_first_not_of("0123456789") != std::string::npos || !holds(pid, inodes)) continue;
    std::ifstream in("/proc/" + pid + "/comm");
    std::string name;
    std::getline(in, name);
    owner = "pid " + pid + " (" + name + ")";
    break;
  }
  closedir(proc);
  return owner;
}

}  // namespace commkit
