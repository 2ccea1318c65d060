// The floor under any start of N ranks by one server: N clients connect to a hub over loopback TCP,
// send 128 bytes, and get 128 bytes back when all have.  ranks= workers= timeout=; prints one JSON
// line.
//
// A process may hold 20,000 descriptors, so there is one hub for every 19,000 clients.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

#include "rig.h"

namespace {

constexpr int kPerHub = 19000;
constexpr int kBytes = 128;

[[noreturn]] void die(const char* call) {
  std::perror(call);
  _exit(1);
}

sockaddr_in loopback(uint32_t host, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl((127u << 24) + host);
  address.sin_port = htons(port);
  return address;
}

void add(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll_ctl");
}

void hub(int listener, int clients, int all, rig::Shared* shared) {
  int epoll = epoll_create1(0);
  add(epoll, listener);
  shared->ready++;
  std::vector<int> fds;
  int got = 0;
  char bytes[2 * kBytes];
  epoll_event events[1024];
  while (got < clients) {
    int count = epoll_wait(epoll, events, 1024, -1);
    for (int i = 0; i < count; ++i) {
      int fd = events[i].data.fd;
      if (fd != listener) {
        if (read(fd, bytes, sizeof bytes) > 0) ++got;
        continue;
      }
      int client;
      while ((client = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK)) >= 0) {
        add(epoll, client);
        fds.push_back(client);
      }
      if (errno != EAGAIN) die("accept4");
    }
  }
  shared->received += clients;
  while (shared->received.load() < all) usleep(50);
  for (int fd : fds) {
    if (write(fd, bytes, kBytes) != kBytes) die("hub write");
  }
  shared->done++;
  while (shared->finish.load() == 0) usleep(1000);
}

void clients(long low, long high, const std::vector<uint16_t>& ports, rig::Shared* shared) {
  int epoll = epoll_create1(0);
  char bytes[2 * kBytes] = {};
  shared->ready++;
  while (shared->go.load() == 0) usleep(20);
  for (long i = low; i < high; ++i) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) die("socket");
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
    sockaddr_in from = loopback(0x10000u + static_cast<uint32_t>(i / 8) * 4 + 2, 0);
    bind(fd, reinterpret_cast<sockaddr*>(&from), sizeof from);
    sockaddr_in to = loopback(1, ports[static_cast<size_t>(i) % ports.size()]);
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) < 0) die("connect");
    if (write(fd, bytes, kBytes) != kBytes) die("client write");
    add(epoll, fd);
  }
  long got = 0;
  epoll_event events[1024];
  while (got < high - low) {
    int count = epoll_wait(epoll, events, 1024, -1);
    for (int i = 0; i < count; ++i) {
      if (read(events[i].data.fd, bytes, sizeof bytes) <= 0) continue;
      ++got;
      epoll_ctl(epoll, EPOLL_CTL_DEL, events[i].data.fd, nullptr);
    }
  }
  shared->done++;
  while (shared->finish.load() == 0) usleep(1000);
}

}  // namespace

int main(int argc, char** argv) {
  rig::Arguments arguments(argc, argv);
  long ranks = arguments.whole("ranks", 64);
  int hubs = static_cast<int>((ranks + kPerHub - 1) / kPerHub);
  int workers = std::max(arguments.whole("workers", 2), hubs);
  rig::raise_file_limit();
  rig::isolate();
  rig::Shared* shared = rig::share();
  std::vector<pid_t> pids;
  std::vector<uint16_t> ports;
  for (int h = 0; h < hubs; ++h) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_in where = loopback(1, 0);
    socklen_t size = sizeof where;
    if (bind(listener, reinterpret_cast<sockaddr*>(&where), size) < 0 ||
        listen(listener, 65535) < 0)
      die("hub listen");
    getsockname(listener, reinterpret_cast<sockaddr*>(&where), &size);
    ports.push_back(ntohs(where.sin_port));
    int mine = static_cast<int>(ranks / hubs + (h < ranks % hubs ? 1 : 0));
    pids.push_back(rig::worker([=] { hub(listener, mine, static_cast<int>(ranks), shared); }));
    close(listener);
  }
  for (int w = 0; w < workers; ++w) {
    pids.push_back(rig::worker(
        [=] { clients(w * ranks / workers, (w + 1) * ranks / workers, ports, shared); }));
  }
  double deadline = commkit::now() + arguments.number("timeout", 120);
  bool good = rig::await(shared->ready, hubs + workers, deadline, pids);
  auto before = rig::netstat();
  double start = commkit::now();
  shared->go = 1;
  good = good && rig::await(shared->done, hubs + workers, deadline, pids);
  double took = commkit::now() - start;
  auto after = rig::netstat();
  shared->finish = 1;
  rig::end(pids);
  if (!good) {
    std::fprintf(stderr, "floor: not done before the deadline\n");
    return 1;
  }
  std::printf(
      "{\"ranks\": %ld, \"hubs\": %d, \"workers\": %d, \"seconds\": %.5f, \"overflows\": %lu}\n",
      ranks, hubs, workers, took,
      static_cast<unsigned long>(after["ListenOverflows"] - before["ListenOverflows"]));
  return 0;
}
