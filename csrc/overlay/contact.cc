#include "overlay/contact.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "net/resolver.h"

namespace commkit {

namespace {

constexpr double kDialSeconds = 3.0;
constexpr double kLongestBackoff = 1.0;
constexpr size_t kMaxPublished = 4096;

// Opcodes of torch's TCPStore that an agent uses as a client of torchrun's store.
constexpr char kStoreValidate = 0, kStoreSet = 1, kStoreGet = 3, kStoreWait = 6, kStorePing = 13;
constexpr uint32_t kStoreMagic = 0x3C85F7CE;

std::string store_hello() {
  Writer w;
  w.u8(kStoreValidate).u32(kStoreMagic);
  return w.take();
}

std::string store_string(const std::string& s) {
  Writer w;
  w.u64(s.size());
  return w.take() + s;
}

StreamPtr connect_stream(Loop& loop, const SocketAddress& to) {
  int fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return nullptr;
  if (connect(fd, to.get(), to.length()) < 0 && errno != EINPROGRESS) {
    ::close(fd);
    return nullptr;
  }
  auto stream = Stream::make(loop, fd, to.text(), true);
  stream->no_delay();
  return stream;
}

}  // namespace

std::string root_text(uint16_t port, const std::vector<std::string>& addresses,
                      const std::string& machine) {
  std::string text = "commkit1 port=" + std::to_string(port) + " machine=" + machine;
  for (const auto& address : addresses) text += " addr=" + address;
  return text;
}

std::vector<SocketAddress> parse_root_text(const std::string& text,
                                           const std::string& own_machine) {
  std::istringstream in(text);
  std::string word, machine;
  uint16_t port = 0;
  std::vector<SocketAddress> out;
  if (!(in >> word) || word != "commkit1") return out;
  while (in >> word) {
    if (word.rfind("port=", 0) == 0) {
      long number = std::strtol(word.c_str() + 5, nullptr, 10);
      port = number > 0 && number <= 65535 ? static_cast<uint16_t>(number) : uint16_t{0};
    }
    if (word.rfind("machine=", 0) == 0) machine = word.substr(8);
    if (word.rfind("addr=", 0) == 0 && port != 0) {
      auto address = SocketAddress::parse(word.substr(5), port);
      if (address && (!address->is_loopback() || machine == own_machine)) out.push_back(*address);
    }
  }
  return out;
}

std::string root_store_key(const Config& config) { return "commkit/" + config.job_id + "/root"; }

std::shared_ptr<Contact> Contact::start(Loop& loop, Config config, Hello hello, Dialer::Terms terms,
                                        Outcome outcome) {
  auto self = std::shared_ptr<Contact>(new Contact(loop));
  self->config_ = std::move(config);
  self->terms_ = std::move(terms);
  self->hello_ = std::move(hello);
  self->outcome_ = std::move(outcome);
  self->started_ = now();
  std::weak_ptr<Contact> weak = self;
  loop.defer([weak] {
    if (auto me = weak.lock(); me && !me->stopped_) me->attempt();
  });
  return self;
}

Contact::~Contact() { stop(); }

void Contact::stop() {
  stopped_ = true;
  loop_.cancel(timer_);
  if (dialer_) dialer_->stop();
  dialer_.reset();
  if (store_) store_->close();
  store_.reset();
}

std::string Contact::status() const {
  std::string where;
  switch (config_.root_kind) {
    case RootKind::kElastic:
      where = "torchrun's store at " + config_.root_host;
      break;
    case RootKind::kFile:
      where = "the rendezvous file " + config_.root_path;
      break;
    case RootKind::kPublished:
      where = config_.root_published;
      break;
    default:
      where = config_.root_host;
  }
  if (config_.root_kind == RootKind::kElastic || config_.root_kind == RootKind::kEndpoint) {
    for (size_t i = 0; i < config_.root_ports.size(); ++i) {
      where += (i == 0 ? ":" : ",") + std::to_string(config_.root_ports[i]);
    }
  }
  std::string text = "the root at " + where + " has not answered";
  if (double asked = now() - asked_name_at_; asked_name_at_ > 0 && asked > 1) {
    text += ": the look-up of " + config_.root_host + " has taken " +
            std::to_string(static_cast<int>(asked)) +
            " s so far (does a nameserver of /etc/resolv.conf answer?)";
  }
  if (!last_error_.empty())
    text += " (" + std::to_string(tries_) + " tries; last: " + last_error_ + ")";
  return text;
}

void Contact::again(const std::string& why) {
  last_error_ = why;
  ++tries_;
  loop_.cancel(timer_);
  if (store_) store_->close();
  store_.reset();
  std::weak_ptr<Contact> weak = weak_from_this();
  timer_ = loop_.after(backoff_ * jitter(), [weak] {
    if (auto self = weak.lock(); self && !self->stopped_) self->attempt();
  });
  backoff_ = std::min(backoff_ * 1.5, kLongestBackoff);
}

void Contact::attempt() {
  switch (config_.root_kind) {
    case RootKind::kFile:
      return read_file();
    case RootKind::kPublished:
      return dial(parse_root_text(config_.root_published, config_.machine));
    default:
      return look_up_name();
  }
}

void Contact::look_up_name() {
  std::weak_ptr<Contact> weak = weak_from_this();
  asked_name_at_ = now();
  resolve(loop_, config_.root_host,
          [weak](std::vector<SocketAddress> found, const std::string& error) {
            auto self = weak.lock();
            if (!self || self->stopped_) return;
            self->asked_name_at_ = 0;
            if (!error.empty()) {
              double patience = self->config_.dns_patience;
              // A nameserver that is down takes longer than that to be given up once.
              bool repeated = self->tries_ > 0;
              if (repeated && patience > 0 && now() - self->started_ > patience) {
                return self->outcome_.hopeless(
                    error + " (tried for " + std::to_string(static_cast<int>(patience)) +
                    " s); give MASTER_ADDR as a name that every host resolves, or as an address");
              }
              return self->again(error);
            }
            std::vector<SocketAddress> to;
            for (uint16_t port : self->config_.root_ports) {
              for (auto address : found) {
                address.set_port(port);
                to.push_back(address);
              }
            }
            bool store = self->config_.root_kind == RootKind::kElastic && self->store_turn_;
            self->store_turn_ = true;
            if (!store) return self->dial(std::move(to));
            // A name may have addresses that nobody answers at: each in its turn.
            self->ask_store(to[self->store_tries_++ % to.size()], to.size() > 1);
          });
}

void Contact::ask_store(const SocketAddress& at, bool others) {
  store_in_.clear();
  alive_ = asked_value_ = false;
  store_ = connect_stream(loop_, at);
  if (!store_) return again("cannot connect to torchrun's store at " + at.text());
  std::weak_ptr<Contact> weak = weak_from_this();
  std::string key = root_store_key(config_);
  // The key may be long in coming; the PING before it is answered at once by whoever is a store.
  Writer ping, wait;
  ping.u8(kStorePing).u32(1);
  wait.u8(kStoreWait).u64(1);
  store_->send(store_hello() + ping.take() + wait.take() + store_string(key));
  auto arm = [this, weak, at](double seconds) {
    loop_.cancel(timer_);
    timer_ = loop_.after(seconds, [weak, at] {
      auto self = weak.lock();
      if (self && !self->stopped_) self->again("no answer from torchrun's store at " + at.text());
    });
  };
  arm(kDialSeconds);
  store_->on_connected([weak, arm, others] {
    // Alone it may be busy with thousands of others.
    if (auto self = weak.lock(); self && !self->stopped_)
      arm(others ? std::min(30.0, kDialSeconds * (1 << std::min(self->tries_, 4))) : 30.0);
  });
  store_->on_bytes([weak, key](const char* data, size_t size) {
    auto self = weak.lock();
    if (!self || self->stopped_) return;
    std::string& in = self->store_in_;
    in.append(data, size);
    if (!self->alive_) {
      if (in.size() < 4) return;
      self->alive_ = true;
      self->loop_.cancel(self->timer_);
      in.erase(0, 4);
      if (in.empty()) return;
    }
    if (!self->asked_value_) {
      if (in[0] != 0) return self->again("torchrun's store refused to wait for the root's key");
      in.erase(0, 1);
      self->asked_value_ = true;
      Writer get;
      get.u8(kStoreGet);
      self->store_->send(get.take() + store_string(key));
    }
    if (in.size() < 8) return;
    uint64_t length = Reader(in).u64();
    if (length > kMaxPublished)
      return self->again("torchrun's store answered with a value of unexpected length");
    if (in.size() < 8 + length) return;
    std::string value = in.substr(8, length);
    self->store_->close();
    self->store_.reset();
    auto to = parse_root_text(value, self->config_.machine);
    if (to.empty()) return self->again("torchrun's store holds no usable root address: " + value);
    self->dial(std::move(to));
  });
  store_->on_close([weak](const std::string& why) {
    auto self = weak.lock();
    if (!self || self->stopped_) return;
    // A variable left over from another launcher: then the root itself may be at that port.
    self->store_turn_ = false;
    self->again("torchrun's store: " + why);
  });
  store_->start();
}

void Contact::read_file() {
  int fd = open(config_.root_path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return again("open " + config_.root_path + ": " + std::strerror(errno));
  char buffer[kMaxPublished];
  ssize_t n = read(fd, buffer, sizeof buffer);
  ::close(fd);
  auto to =
      parse_root_text(std::string(buffer, n > 0 ? static_cast<size_t>(n) : 0), config_.machine);
  if (to.empty()) return again(config_.root_path + " does not hold a root's address yet");
  dial(std::move(to));
}

void Contact::dial(std::vector<SocketAddress> to) {
  std::weak_ptr<Contact> weak = weak_from_this();
  Dialer::Outcome outcome;
  outcome.open = [weak](StreamPtr stream, uint16_t type, const std::string&) {
    auto self = weak.lock();
    if (!self || self->stopped_) return stream->close();
    if (type != kHeld) {
      stream->close();
      return self->again("the root answered out of order");
    }
    self->dialer_.reset();
    self->stopped_ = true;
    self->outcome_.held(std::move(stream));
  };
  outcome.failed = [weak](const std::string& why, bool retry) {
    auto self = weak.lock();
    if (!self || self->stopped_) return;
    if (!retry) return self->outcome_.hopeless(why);
    self->again(why);
  };
  // Somebody else may hold the first of several ports, and say nothing: the next is tried soon, but
  // a root that is only busy must get longer in the end.
  bool ports = std::any_of(to.begin(), to.end(),
                           [&](const auto& one) { return one.port() != to.front().port(); });
  if (ports) terms_.answer_seconds = std::min(30.0, 0.5 * (1 << std::min(tries_, 6)));
  dialer_ = Dialer::dial(loop_, std::move(to), hello_, terms_, std::move(outcome));
}

void publish_in_store(Loop& loop, const std::vector<SocketAddress>& store, const std::string& key,
                      const std::string& value, std::function<void(std::string)> done) {
  struct State {
    StreamPtr stream;
    std::string in;
    Loop::TimerId timer = 0;
  };
  auto state = std::make_shared<State>();
  if (!store.empty()) state->stream = connect_stream(loop, store.front());
  if (!state->stream) return loop.defer([done] { done("cannot connect to torchrun's store"); });
  auto finish = [&loop, state, done](const std::string& error) {
    if (!state->stream) return;
    loop.cancel(state->timer);
    state->stream->close();
    auto stream = std::move(state->stream);
    state->stream.reset();
    loop.defer([stream] {});  // not destroyed inside its own callback
    done(error);
  };
  Writer set, ping;
  set.u8(kStoreSet);
  ping.u8(kStorePing).u32(1);
  // SET has no answer; the PING behind it has one, and shows that the key is there.
  state->stream->send(store_hello() + set.take() + store_string(key) + store_string(value) +
                      ping.take());
  state->stream->on_bytes([state, finish](const char* data, size_t size) {
    state->in.append(data, size);
    if (state->in.size() >= 4) finish("");
  });
  state->stream->on_close([finish](const std::string& why) { finish("torchrun's store: " + why); });
  state->timer = loop.after(kDialSeconds, [finish] { finish("torchrun's store does not answer"); });
  state->stream->start();
}

}  // namespace commkit
