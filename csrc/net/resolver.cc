#include "net/resolver.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

namespace commkit {

void resolve(Loop& loop, const std::string& host,
             std::function<void(std::vector<SocketAddress>, std::string error)> done) {
  if (auto numeric = SocketAddress::parse(host, 0)) {
    loop.defer([done, address = *numeric] { done({address}, ""); });
    return;
  }
  auto look_up = [&loop, host, done] {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    int code = getaddrinfo(host.c_str(), nullptr, &hints, &list);
    std::vector<SocketAddress> found;
    std::string error;
    if (code != 0) {
      error = "cannot resolve " + host + ": " +
              (code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code));
    }
    for (addrinfo* it = list; it != nullptr; it = it->ai_next) {
      sockaddr_storage storage{};
      std::memcpy(&storage, it->ai_addr, it->ai_addrlen);
      found.emplace_back(storage, it->ai_addrlen);
    }
    if (list != nullptr) freeaddrinfo(list);
    loop.post([done, found = std::move(found), error = std::move(error)] { done(found, error); });
  };
  try {
    std::thread(look_up).detach();
  } catch (const std::system_error& error) {
    loop.defer(
        [done, why = "cannot start a look-up of " + host + ": " + error.what()] { done({}, why); });
  }
}

}  // namespace commkit
