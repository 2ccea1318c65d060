// What tells one host from another: two processes with equal boot id and network namespace can
// reach each other over 127.0.0.1 and abstract Unix sockets, so one agent serves both.
#pragma once

#include <string>

namespace commkit {

struct HostIdentity {
  std::string boot_id;  // of the running kernel; changes at every boot
  std::string netns;    // inode of the network namespace
  std::string mntns;    // inode of the mount namespace: whether two processes share /tmp
  std::string hostname;
};

// Throws SystemError; COMMKIT_HOST_ID is the way around a /proc that does not tell.
HostIdentity host_identity();

}  // namespace commkit
