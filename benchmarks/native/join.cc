// Simulated ranks join a world: real Agent objects and real sockets, many hosts in a worker
// process.
//
//   ranks= per_host= workers= port= degree= secret= spread= shuffle= timeout= tp= dp= pp=
//
// Worker 0 holds the root's host alone, so its counters are those of a root.  A simulated rank is a
// Unix connection that sends the join request of a real one and reads the answer.  Agents write no
// logs. Prints one JSON line.
//
// With tp, dp and pp (their product the ranks) a rank that has heard that the world is formed goes
// on to create Megatron's groups as far as that is commkit's part: one digest of all ranks is
// compared over the tree; then in each group the first rank sets an id of 128 bytes, and the others
// wait for it and get it, as NCCL's do.  A real rank sends the latter over its store's connection;
// here they go over the one it has, which the agent handles alike.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <memory>
#include <random>

#include "megatron.h"
#include "net/crypto.h"
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
  megatron::Shape shape;
  int hosts() const { return (ranks + per_host - 1) / per_host; }
};

struct Counters {
  uint64_t peak_open = 0, accepted = 0, messages = 0, bytes = 0, operations = 0;
  void most(const Counters& other) {
    peak_open = std::max(peak_open, other.peak_open);
    accepted = std::max(accepted, other.accepted);
    messages = std::max(messages, other.messages);
    bytes = std::max(bytes, other.bytes);
    operations = std::max(operations, other.operations);
  }
};

// When the last rank had joined, had compared digests, had all its ids.
struct Marks {
  double joined = 0, agreed = 0, exchanged = 0;
  void last(const Marks& other) {
    joined = std::max(joined, other.joined);
    agreed = std::max(agreed, other.agreed);
    exchanged = std::max(exchanged, other.exchanged);
  }
};

struct Result {
  Marks marks;
  Counters root, others;
  uint64_t bytes = 0, messages = 0;  // of all agents, sent and received
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
    result.marks = marks_;
    // The others may still need this worker's agents.
    shared_->done++;
    loop_stays();
    for (size_t i = 0; i < agents_.size(); ++i) {
      const auto& traffic = *agents_[i]->traffic();
      Counters counters{traffic.peak_open, agents_[i]->accepted_total(),
                        traffic.frames_in + traffic.frames_out,
                        traffic.bytes_in + traffic.bytes_out, agents_[i]->operations()};
      result.bytes += counters.bytes;
      result.messages += counters.messages;
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
      size_t place = ranks_.size();
      stream->on_frames([this, place](uint16_t type, std::string_view payload) {
        answered(ranks_[place], type, payload);
      });
      stream->on_close([](const std::string& why) { die("a rank lost its agent: " + why); });
      stream->start();
      Writer w;
      w.u32(commkit::kMagic).u32(600000).u32(1000).i32(rank).i32(local);
      stream->send_frame(commkit::kRankJoin, w.take() + common);
      ranks_.push_back({std::move(stream), rank, {}, 0});
    }
    expected_ += static_cast<int>(std::min(plan_.per_host, plan_.ranks - host * plan_.per_host));
    ++begun_;
  }

  struct Rank {
    StreamPtr stream;
    int rank;
    std::vector<std::string> keys;  // of its groups' ids
    size_t missing;                 // ids that it has not set or got
  };

  static constexpr uint64_t kDigestId = 1, kFirstKeyId = 2;

  void answered(Rank& rank, uint16_t type, std::string_view payload) {
    commkit::Reader r(payload);
    switch (type) {
      case commkit::kFailed: {
        std::string kind = r.str();
        die(kind + ": " + r.str());
      }
      case commkit::kOpFailed: {
        r.u64();
        std::string kind = r.str();
        die(kind + ": " + r.str());
      }
      case commkit::kFormed:
        if (plan_.shape.tp > 0) {
          compare_digest(rank);
        } else {
          rank_done();
        }
        marks_.joined = commkit::now();
        return;
      case commkit::kOpDone:
        marks_.agreed = commkit::now();
        return exchange_ids(rank);
      case commkit::kKeyDone: {
        uint64_t id = r.u64();
        return key_done(rank, id, commkit::get_reply(r));
      }
      default:
        return;
    }
  }

  void rank_done() {
    if (++finished_ < expected_ || begun_ < static_cast<int>(hosts_.size())) return;
    loop_.stop();
  }

  void compare_digest(Rank& rank) {
    static const std::string digest = commkit::sha256("a layout");
    static const std::string description(300, 'd');
    Writer w;
    w.u64(kDigestId).u8(commkit::kAgree).str("groups#0").u32(600000).i32(-1).u8(1);
    w.str(digest).str(description);
    rank.stream->send_frame(commkit::kRankOp, w.take());
  }

  void ask(Rank& rank, size_t group, commkit::KvOp op) {
    commkit::KvRequest request;
    request.op = op;
    request.key = rank.keys[group];
    if (op == commkit::KvOp::kSet) request.value.assign(128, 'i');
    Writer w;
    w.u64(kFirstKeyId + 2 * group + (op == commkit::KvOp::kGet ? 1 : 0));
    put(w, request);
    rank.stream->send_frame(commkit::kRankKey, w.take());
  }

  // A rank creates its groups one after the other or in several threads; what that adds is the
  // rank's own affair, so here it asks for all at once.
  void exchange_ids(Rank& rank) {
    std::vector<bool> first;
    megatron::groups_of(plan_.shape, rank.rank,
                        [&](const char* family, int lowest, int, int place) {
                          rank.keys.push_back(megatron::id_key(family, lowest));
                          first.push_back(place == 0);
                        });
    rank.missing = rank.keys.size();
    for (size_t i = 0; i < first.size(); ++i)
      ask(rank, i, first[i] ? commkit::KvOp::kSet : commkit::KvOp::kWait);
    if (rank.missing == 0) rank_done();
  }

  void key_done(Rank& rank, uint64_t id, commkit::KvReply reply) {
    size_t group = (id - kFirstKeyId) / 2;
    bool got = (id - kFirstKeyId) % 2 == 1;
    bool set = first_in(rank, group);
    if (!set && !got && reply.number >= 0) return ask(rank, group, commkit::KvOp::kGet);
    if (!set && reply.value != std::string(128, 'i')) die("an id that is not the one that was set");
    if (--rank.missing > 0) return;
    marks_.exchanged = commkit::now();
    rank_done();
  }

  bool first_in(const Rank& rank, size_t group) const {
    std::string owner = "commkit:" + std::to_string(rank.rank) + "/";
    return rank.keys[group].compare(0, owner.size(), owner) == 0;
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
  std::deque<Rank> ranks_;  // whose places stay
  int expected_ = 0, finished_ = 0, begun_ = 0;
  Marks marks_;
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
  plan.shape = {arguments.whole("tp", 0), arguments.whole("dp", 0), arguments.whole("pp", 0)};
  if (plan.shape.tp > 0 && plan.shape.ranks() != plan.ranks) {
    std::fprintf(stderr, "join: tp * dp * pp is %d, expected %d ranks\n", plan.shape.ranks(),
                 plan.ranks);
    return 2;
  }
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
    all.marks.last(one.marks);
    all.bytes += one.bytes;
    all.messages += one.messages;
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
           ", \"bytes\": " + std::to_string(c.bytes) +
           ", \"operations\": " + std::to_string(c.operations) + "}";
  };
  std::printf(
      "{\"ranks\": %d, \"isolated\": %s, \"hosts\": %d, \"workers\": %d, \"seconds\": %.5f, "
      "\"cpu_seconds\": %.3f, "
      "\"resident_mib\": %ld, "
      "\"overflows\": %lu, \"retransmits\": %lu, \"root\": %s, \"busiest_other\": %s",
      plan.ranks, isolated ? "true" : "false", plan.hosts(), plan.workers, all.marks.joined - start,
      all.cpu, all.resident,
      static_cast<unsigned long>(after["ListenOverflows"] - before["ListenOverflows"]),
      static_cast<unsigned long>(after["TCPSynRetrans"] - before["TCPSynRetrans"]),
      counters(all.root).c_str(), counters(all.others).c_str());
  if (plan.shape.tp > 0)
    std::printf(
        ", \"digest_seconds\": %.5f, \"ids_seconds\": %.5f, \"all_bytes\": %lu, "
        "\"all_messages\": %lu",
        all.marks.agreed - start, all.marks.exchanged - start,
        static_cast<unsigned long>(all.bytes), static_cast<unsigned long>(all.messages));
  std::printf("}\n");
  return 0;
}
