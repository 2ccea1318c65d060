// Who is at the other end of a local connection.
#pragma once

#include <sys/types.h>

#include <optional>

#include "net/address.h"

namespace commkit {

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};

// Of the process that connected to (or listened at) the other end of a Unix stream socket, as of
// then.  Throws SystemError.
PeerCredentials peer_credentials(int unix_fd);

// Of the socket at the other end of a TCP connection inside this network namespace; `local` and
// `remote` are getsockname() and getpeername() of this end.  nullopt: there is no such socket
// (any more).  Asks the kernel for exactly that socket by sock_diag; reads /proc/net/tcp where
// that is refused.  Throws SystemError when neither can tell.
std::optional<uid_t> tcp_owner_uid(const SocketAddress& local, const SocketAddress& remote);

// The two ways of tcp_owner_uid.
std::optional<uid_t> tcp_owner_uid_by_diag(const SocketAddress& local, const SocketAddress& remote);
std::optional<uid_t> tcp_owner_uid_by_proc(const SocketAddress& local, const SocketAddress& remote);

}  // namespace commkit
