// commkit's native leaf pieces as a Python module, for tests; and a small server around
// StoreSession and KeyTable, with a thread that needs no GIL, since some of torch's store
// operations keep it.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/address.h"
#include "net/crypto.h"
#include "net/peer.h"
#include "net/system_error.h"
#include "wire/key_table.h"
#include "wire/store_session.h"

namespace commkit {

void register_net(pybind11::module_& m);

namespace {

namespace py = pybind11;

constexpr size_t kEnoughUnsent = 1024 * 1024;

// The table at once (seed 0), or later and in any order, as owners on other hosts answer.
class Keys : public KeyValue {
 public:
  explicit Keys(unsigned seed) : late_(seed != 0), random_(seed) {}

  uint64_t request(KvRequest&& request, Done done) override {
    uint64_t id = ++last_id_;
    if (late_) {
      pending_.push_back({id, std::move(request), std::move(done)});
    } else {
      apply(id, std::move(request), std::move(done));
    }
    return id;
  }

  void cancel(uint64_t id) override {
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(),
                                  [id](const Pending& one) { return one.id == id; }),
                   pending_.end());
    if (auto it = in_table_.find(id); it != in_table_.end()) {
      table.cancel(it->second);
      in_table_.erase(it);
    }
  }

  bool turn() {
    // One at a time: what it wakes may cancel others.
    for (size_t left = pending_.size(); left > 0 && !pending_.empty(); --left) {
      std::swap(pending_[random_() % pending_.size()], pending_.back());
      Pending one = std::move(pending_.back());
      pending_.pop_back();
      apply(one.id, std::move(one.request), std::move(one.done));
    }
    return !pending_.empty();
  }

  KeyTable table;

 private:
  struct Pending {
    uint64_t id;
    KvRequest request;
    Done done;
  };

  void apply(uint64_t id, KvRequest&& request, Done done) {
    in_table_[id] = 0;
    uint64_t inner =
        table.apply(std::move(request), [this, id, done = std::move(done)](KvReply&& reply) {
          in_table_.erase(id);
          done(std::move(reply));
        });
    if (auto it = in_table_.find(id); it != in_table_.end()) it->second = inner;
  }

  bool late_;
  std::mt19937 random_;
  uint64_t last_id_ = 0;
  std::vector<Pending> pending_;
  std::map<uint64_t, uint64_t> in_table_;
};

class Server {
 public:
  Server(const std::string& token, unsigned seed, size_t piece, const std::string& default_token)
      : token_(token), piece_(piece), default_token_(default_token), keys_(seed) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
    if (bind(listener_, any.get(), any.length()) < 0 || listen(listener_, 512) < 0) {
      throw SystemError("listen", "127.0.0.1", errno);
    }
    port_ = SocketAddress::local_of(listener_).port();
    thread_ = std::thread([this] { run(); });
  }

  ~Server() {
    py::gil_scoped_release release;
    stop_ = true;
    poke();
    thread_.join();
    close(listener_);
    close(wake_);
  }

  uint16_t port() const { return port_; }

  std::vector<std::string> drops() {
    std::lock_guard<std::mutex> lock(mutex_);
    return drops_;
  }

  // keys, queues, waiting, bytes, operations; connections and the sessions that wait
  std::map<std::string, uint64_t> counters() {
    py::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    auto c = keys_.table.counters();
    uint64_t waiting = 0;
    for (const auto& conn : conns_) waiting += conn->session->waiting() ? 1 : 0;
    return {{"keys", c.keys},
            {"queues", c.queues},
            {"waiting", c.waiting},
            {"bytes", c.bytes},
            {"operations", c.operations},
            {"connections", conns_.size()},
            {"waiting_sessions", waiting}};
  }

 private:
  struct Conn {
    int fd = -1;
    std::unique_ptr<StoreSession> session;
    std::string out;
    bool dropped = false;
    ~Conn() { close(fd); }
  };

  void poke() {
    uint64_t one = 1;
    if (write(wake_, &one, sizeof one) < 0) std::abort();
  }

  void run() {
    bool busy = false;
    while (!stop_) {
      std::vector<pollfd> fds = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
      for (const auto& conn : conns_) {
        int events = conn->session->want_read() ? POLLIN : 0;
        if (!conn->out.empty()) events |= POLLOUT;
        fds.push_back({conn->fd, static_cast<short>(events), 0});
      }
      poll(fds.data(), fds.size(), busy ? 0 : -1);
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 2; i < fds.size(); ++i) {
        Conn& conn = *conns_[i - 2];
        if ((fds[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) receive(conn);
      }
      busy = keys_.turn();
      for (auto& conn : conns_) flush(*conn);
      conns_.erase(std::remove_if(conns_.begin(), conns_.end(),
                                  [](const auto& conn) { return conn->dropped; }),
                   conns_.end());
      if ((fds[1].revents & POLLIN) != 0) accept_one();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    conns_.clear();
  }

  void accept_one() {
    int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    auto conn = std::make_unique<Conn>();
    Conn* c = conn.get();
    conn->fd = fd;
    conn->session = std::make_unique<StoreSession>(
        [this](std::string_view token) { return token == token_ ? &keys_ : nullptr; },
        [c](std::string_view bytes) {
          c->out.append(bytes);
          if (c->out.size() > kEnoughUnsent) c->session->hold(true);
        },
        [this, c](std::string_view why) {
          drops_.emplace_back(why);
          c->dropped = true;
        });
    if (!default_token_.empty()) conn->session->default_token(default_token_);
    conns_.push_back(std::move(conn));
  }

  void receive(Conn& conn) {
    std::vector<char> buffer(256 * 1024);
    ssize_t n = recv(conn.fd, buffer.data(), buffer.size(), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      conn.dropped = true;
      return;
    }
    size_t size = static_cast<size_t>(n);
    size_t piece = piece_ == 0 ? size : piece_;
    for (size_t at = 0; at < size && !conn.dropped; at += piece) {
      conn.session->feed(buffer.data() + at, std::min(piece, size - at));
    }
  }

  void flush(Conn& conn) {
    while (!conn.out.empty()) {
      ssize_t n = send(conn.fd, conn.out.data(), conn.out.size(), MSG_NOSIGNAL);
      if (n < 0) {
        if (errno != EAGAIN && errno != EINTR) conn.dropped = true;
        break;
      }
      conn.out.erase(0, static_cast<size_t>(n));
    }
    if (conn.out.size() <= kEnoughUnsent) conn.session->hold(false);
  }

  std::string token_;
  size_t piece_;
  std::string default_token_;
  int listener_ = -1, wake_ = -1;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards what follows
  Keys keys_;
  std::vector<std::string> drops_;
  std::vector<std::unique_ptr<Conn>> conns_;
  std::thread thread_;
};

KvReply reply_of(bool found, int64_t number, const std::string& value) {
  KvReply reply;
  reply.found = found;
  reply.number = number;
  reply.value = value;
  return reply;
}

// A session without a socket.  ask(op, key) answers a request: a tuple (found, number, value), or
// None for never.
class Bare {
 public:
  using Ask = std::function<py::object(int op, py::bytes key)>;

  explicit Bare(Ask ask) : keys_(std::move(ask)) {
    session_ =
        std::make_unique<StoreSession>([this](std::string_view) { return &keys_; },
                                       [this](std::string_view bytes) { sent_.append(bytes); },
                                       [this](std::string_view why) { dropped_ = why; });
    session_->on_want_read([this] { ++resumed_; });
  }

  void feed(const std::string& bytes) { session_->feed(bytes.data(), bytes.size()); }
  void hold(bool on) { session_->hold(on); }
  py::bytes sent() { return py::bytes(std::exchange(sent_, "")); }
  std::string dropped() const { return dropped_; }
  bool want_read() const { return session_->want_read(); }
  bool waiting() const { return session_->waiting(); }
  py::bytes token() const { return py::bytes(session_->token()); }
  int resumed() const { return resumed_; }
  void end() { session_.reset(); }
  std::vector<uint64_t> unanswered() const {
    std::vector<uint64_t> ids;
    for (const auto& [id, done] : keys_.waiting) ids.push_back(id);
    return ids;
  }
  void answer(uint64_t id, bool found, int64_t number, const std::string& value) {
    auto node = keys_.waiting.extract(id);
    if (node.empty()) throw std::out_of_range("no such request");
    node.mapped()(reply_of(found, number, value));
  }

 private:
  struct Asked : KeyValue {
    explicit Asked(Ask f) : ask(std::move(f)) {}
    uint64_t request(KvRequest&& q, Done done) override {
      uint64_t id = last++;  // from 0: no id is special
      py::object answer = ask(static_cast<int>(q.op), py::bytes(q.key));
      if (answer.is_none()) {
        waiting.emplace(id, std::move(done));
      } else {
        auto [found, number, value] = answer.cast<std::tuple<bool, int64_t, std::string>>();
        done(reply_of(found, number, value));
      }
      return id;
    }
    void cancel(uint64_t id) override { waiting.erase(id); }
    Ask ask;
    uint64_t last = 0;
    std::map<uint64_t, Done> waiting;
  };

  Asked keys_;
  std::string sent_, dropped_;
  int resumed_ = 0;
  std::unique_ptr<StoreSession> session_;
};

// KeyTable with Python callables: done(found, number, value, keys).
uint64_t apply(KeyTable& table, int op, const std::string& key, const std::string& value,
               const std::string& expected, int64_t amount, py::function done) {
  KvRequest request;
  request.op = static_cast<KvOp>(op);
  request.key = key;
  request.value = value;
  request.expected = expected;
  request.amount = amount;
  return table.apply(std::move(request), [done = std::move(done)](KvReply&& reply) {
    py::list keys;
    for (const auto& one : reply.keys) keys.append(py::bytes(one));
    done(reply.found, reply.number, py::bytes(reply.value), keys);
  });
}

SocketAddress parsed(const std::string& text, uint16_t port) {
  auto address = SocketAddress::parse(text, port);
  if (!address) throw std::invalid_argument(text);
  return *address;
}

}  // namespace

PYBIND11_MODULE(commkit_native, m) {
  register_net(m);

  m.def("parse_address", [](const std::string& text, uint16_t port) -> py::object {
    auto address = SocketAddress::parse(text, port);
    if (!address) return py::none();
    return py::make_tuple(address->ip(), address->text(), scope_name(address->scope()));
  });
  m.def("peer_credentials", [](int fd) {
    auto peer = peer_credentials(fd);
    return std::make_pair(peer.pid, peer.uid);
  });
  m.def("tcp_owner_uid", [](int fd, const std::string& how) {
    auto local = SocketAddress::local_of(fd);
    auto remote = SocketAddress::peer_of(fd);
    if (how == "diag") return tcp_owner_uid_by_diag(local, remote);
    if (how == "proc") return tcp_owner_uid_by_proc(local, remote);
    return tcp_owner_uid(local, remote);
  });
  m.def("tcp_owner_uid_of", [](const std::string& local, uint16_t local_port,
                               const std::string& remote, uint16_t remote_port,
                               const std::string& how) {
    auto here = parsed(local, local_port);
    auto there = parsed(remote, remote_port);
    return how == "diag" ? tcp_owner_uid_by_diag(here, there) : tcp_owner_uid_by_proc(here, there);
  });
  m.def("equal_in_constant_time",
        [](const std::string& a, const std::string& b) { return equal_in_constant_time(a, b); });
  m.def("random_bytes", [](size_t count) { return py::bytes(random_bytes(count)); });

  py::class_<Server>(m, "Server")
      .def(py::init<std::string, unsigned, size_t, std::string>(), py::arg("token"),
           py::arg("seed") = 0, py::arg("piece") = 0, py::arg("default_token") = "")
      .def_property_readonly("port", &Server::port)
      .def("drops", &Server::drops)
      .def("counters", &Server::counters);

  py::class_<Bare>(m, "Bare")
      .def(py::init<Bare::Ask>())
      .def("feed", &Bare::feed)
      .def("hold", &Bare::hold)
      .def("sent", &Bare::sent)
      .def("end", &Bare::end)
      .def("unanswered", &Bare::unanswered)
      .def("answer", &Bare::answer, py::arg("id"), py::arg("found") = true, py::arg("number") = 0,
           py::arg("value") = "")
      .def_property_readonly("dropped", &Bare::dropped)
      .def_property_readonly("want_read", &Bare::want_read)
      .def_property_readonly("waiting", &Bare::waiting)
      .def_property_readonly("token", &Bare::token)
      .def_property_readonly("resumed", &Bare::resumed);

  py::class_<KeyTable>(m, "KeyTable")
      .def(py::init<>())
      .def("apply", &apply)
      .def("cancel", &KeyTable::cancel)
      .def("dump", [](const KeyTable& table) { return py::bytes(table.dump()); })
      .def("restore", [](KeyTable& table, const std::string& dumped) { table.restore(dumped); })
      .def("counters", [](const KeyTable& table) {
        auto c = table.counters();
        return std::map<std::string, uint64_t>{{"operations", c.operations},
                                               {"keys", c.keys},
                                               {"queues", c.queues},
                                               {"waiting", c.waiting},
                                               {"bytes", c.bytes}};
      });
}

}  // namespace commkit
