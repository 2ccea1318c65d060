// Simulated ranks join a world: real Agent objects and real sockets, many hosts in a worker
// process.
//
//   ranks= per_host= workers= port= degree= secret= spread= shuffle= timeout=
//
// Worker 0 holds the root's host alone, so its counters are those of a root.  A simulated rank is a
// Unix connection that sends the join request of a real one and reads the answer.  Agents write no
// logs. Prints one JSON line.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <random>

#include "net/stream.h"
#include "overlay/agent.h"
#include "overlay/protocol.h"
#include "overlay/spawn.h"
#include "rig.h"

using commkit::Agent;
using commkit::Loop;
using commkit::Stream;
using commkit::StreamPtr;
using commkit::Writer;

namespace {

struct Plan {
  int ranks = 64, per_host = 8, workers = 2, port = 0, degree = 0;
  std::string secret;
  double spread = 0;
  bool shuffle = true;
  int hosts() const { return (ranks + per_host - 1) / per_host; }
};

struct Counters {
  uint64_t peak_open = 0, accepted = 0, messages = 0, bytes = 0;
  void most(const Counters& other) {
    peak_open = std::max(peak_open, other.peak_open);
    accepted = std::max(accepted, other.accepted);
    messages = std::max(messages, other.messages);
    bytes = std::max(bytes, other.bytes);
  }
};

struct Result {
  double last = 0;
  Counters root, others;
  long resident = 0;
  double cpu = 0;
};

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "join: %s (%s)\n", what.c_str(), std::strerror(errno));
  _exit(1);
}

class Worker {
 public:
  Worker(const Plan& plan, std::vector<int> hosts, rig::Shared* shared)
      : plan_(plan), hosts_(std::move(hosts)), shared_(shared) {
    commkit::Fields fields{{"job_id", "simulated"},
                           {"machine", "simulated"},
                           {"root_kind", "endpoint"},
                           {"root_host", "127.0.0.1"},
                           {"root_ports", std::to_string(plan.port)},
                           {"root_here", "rank0"},
                           {"world_size", std::to_string(plan.ranks)},
                           {"local_size", std::to_string(plan.per_host)},
                           {"secret", plan.secret},
                           {"degree", std::to_string(plan.degree)},
                           {"heartbeat", "600"}};
    fields_ = fields;
  }

  Result run() {
    bool root = !hosts_.empty() && hosts_[0] == 0;
    if (root) begin_host(0);
    shared_->ready++;
    while (shared_->go.load() == 0) usleep(20);
    double start = commkit::now();
    if (!root) {
      if (plan_.spread > 0) {
        std::mt19937 generator(static_cast<unsigned>(hosts_.empty() ? 0 : hosts_[0]));
        std::uniform_real_distribution<double> when(0, plan_.spread);
        for (int host : hosts_) loop_.after(when(generator), [this, host] { begin_host(host); });
      } else {
        begin_some(0);
      }
    } else {
      begin_ranks(0);
    }
    loop_.run();
    (void)start;
    Result result;
    result.last = last_;
    // The others may still need this worker's agents.
    shared_->done++;
    loop_stays();
    for (size_t i = 0; i < agents_.size(); ++i) {
      const auto& traffic = *agents_[i]->traffic();
      Counters counters{traffic.peak_open, agents_[i]->accepted_total(),
                        traffic.frames_in + traffic.frames_out,
                        traffic.bytes_in + traffic.bytes_out};
      (root && i == 0 ? result.root : result.others).most(counters);
    }
    result.resident = rig::resident_mib();
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    result.cpu = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    return result;
  }

 private:
  // A few hosts at a time, so that those already begun are served meanwhile.
  void begin_some(size_t from) {
    size_t to = std::min(hosts_.size(), from + 16);
    for (size_t i = from; i < to; ++i) begin_host(hosts_[i]);
    if (to < hosts_.size()) loop_.after(0, [this, to] { begin_some(to); });
  }

  std::string name(int host) const {
    return "commkit-simulated-" + std::to_string(plan_.port) + "-" + std::to_string(host);
  }

  static socklen_t address(sockaddr_un& where, const std::string& name) {
    where = {};
    where.sun_family = AF_UNIX;
    std::memcpy(where.sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }

  void begin_host(int host) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    sockaddr_un where;
    socklen_t size = address(where, name(host));
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&where), size) < 0 || listen(fd, 128) < 0)
      die("unix listener");
    agents_.push_back(std::make_unique<Agent>(loop_, fd));
    if (host != 0) begin_ranks(host);
  }

  void begin_ranks(int host) {
    commkit::Fields fields = fields_;
    fields["host_key"] = fields["host_name"] = "host" + std::to_string(host);
    Writer body;
    commkit::put(body, fields);
    std::string common = body.take();
    sockaddr_un where;
    socklen_t size = address(where, name(host));
    for (int local = 0; local < plan_.per_host; ++local) {
      int rank = host * plan_.per_host + local;
      if (rank >= plan_.ranks) break;
      int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&where), size) < 0)
        die("a rank's connection");
      auto stream = Stream::make(loop_, fd, "agent");
      stream->on_frames(
          [this](uint16_t type, std::string_view payload) { answered(type, payload); });
      stream->on_close([](const std::string& why) { die("a rank lost its agent: " + why); });
      stream->start();
      Writer w;
      w.u32(commkit::kMagic).u32(600000).u32(1000).i32(rank).i32(local);
      stream->send_frame(commkit::kRankJoin, w.take() + common);
      ranks_.push_back(std::move(stream));
    }
    expected_ += static_cast<int>(std::min(plan_.per_host, plan_.ranks - host * plan_.per_host));
    ++begun_;
  }

  void answered(uint16_t type, std::string_view payload) {
    if (type == commkit::kFailed) {
      commkit::Reader r(payload);
      std::string kind = r.str();
      die(kind + ": " + r.str());
    }
    if (type != commkit::kFormed) return;
    if (++formed_ < expected_ || begun_ < static_cast<int>(hosts_.size())) return;
    last_ = commkit::now();
    loop_.stop();
  }

  void loop_stays() {
    loop_.resume();
    tick();
    loop_.run();
  }

  void tick() {
    if (shared_->done.load() >= plan_.workers + 1) return loop_.stop();
    loop_.after(0.001, [this] { tick(); });
  }

  Plan plan_;
  std::vector<int> hosts_;
  rig::Shared* shared_;
  commkit::Fields fields_;
  Loop loop_;
  std::vector<std::unique_ptr<Agent>> agents_;
  std::vector<StreamPtr> ranks_;
  int expected_ = 0, formed_ = 0, begun_ = 0;
  double last_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  rig::Arguments arguments(argc, argv);
  Plan plan;
  plan.ranks = arguments.whole("ranks", plan.ranks);
  plan.per_host = arguments.whole("per_host", plan.per_host);
  plan.workers = arguments.whole("workers", plan.workers);
  plan.port = arguments.whole("port", 20000 + getpid() % 10000);
  plan.degree = arguments.whole("degree", 0);
  plan.secret = arguments.text("secret", "");
  plan.spread = arguments.number("spread", 0);
  plan.shuffle = arguments.whole("shuffle", 1) != 0;
  rig::raise_file_limit();
  bool isolated = rig::isolate();
  rig::Shared* shared = rig::share();

  std::vector<int> order;
  for (int host = 1; host < plan.hosts(); ++host) order.push_back(host);
  if (plan.shuffle)
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(plan.port)));
  int results[2];
  if (pipe(results) < 0) die("pipe");
  std::vector<pid_t> pids;
  for (int w = 0; w <= plan.workers; ++w) {
    std::vector<int> mine;
    size_t count = order.size(), parts = static_cast<size_t>(plan.workers),
           at = static_cast<size_t>(w);
    if (w == 0) {
      mine = {0};
    } else {
      mine.assign(order.begin() + static_cast<long>((at - 1) * count / parts),
                  order.begin() + static_cast<long>(at * count / parts));
    }
    pids.push_back(rig::worker([&] {
      if (mine.empty()) {
        shared->ready++;
        shared->done++;
        Result none;
        if (write(results[1], &none, sizeof none) != sizeof none) _exit(1);
        while (shared->finish.load() == 0) usleep(1000);
        return;
      }
      Worker worker(plan, mine, shared);
      Result result = worker.run();
      if (write(results[1], &result, sizeof result) != sizeof result) _exit(1);
      while (shared->finish.load() == 0) usleep(1000);
      _exit(0);
    }));
  }
  double deadline = commkit::now() + arguments.number("timeout", 120);
  bool good = rig::await(shared->ready, plan.workers + 1, deadline, pids);
  auto before = rig::netstat();
  double start = commkit::now();
  shared->go = 1;
  good = good && rig::await(shared->done, plan.workers + 1, deadline, pids);
  auto after = rig::netstat();
  Result all;
  for (int w = 0; good && w <= plan.workers; ++w) {
    Result one;
    if (read(results[0], &one, sizeof one) != sizeof one) die("a worker's result");
    all.last = std::max(all.last, one.last);
    all.root.most(one.root);
    all.others.most(one.others);
    all.resident += one.resident;
    all.cpu += one.cpu;
  }
  shared->finish = 1;
  rig::end(pids);
  if (!good) {
    std::fprintf(stderr, "join: not done before the deadline, or a worker died\n");
    return 1;
  }
  auto counters = [](const Counters& c) {
    return "{\"peak_open\": " + std::to_string(c.peak_open) +
           ", \"accepted_total\": " + std::to_string(c.accepted) +
           ", \"messages\": " + std::to_string(c.messages) +
           ", \"bytes\": " + std::to_string(c.bytes) + "}";
  };
  std::printf(
      "{\"ranks\": %d, \"isolated\": %s, \"hosts\": %d, \"workers\": %d, \"seconds\": %.5f, "
      "\"cpu_seconds\": %.3f, "
      "\"resident_mib\": %ld, "
      "\"overflows\": %lu, \"retransmits\": %lu, \"root\": %s, \"busiest_other\": %s}\n",
      plan.ranks, isolated ? "true" : "false", plan.hosts(), plan.workers, all.last - start,
      all.cpu, all.resident,
      static_cast<unsigned long>(after["ListenOverflows"] - before["ListenOverflows"]),
      static_cast<unsigned long>(after["TCPSynRetrans"] - before["TCPSynRetrans"]),
      counters(all.root).c_str(), counters(all.others).c_str());
  return 0;
}
