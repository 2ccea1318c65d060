// Joining, as the root sees it: its port, the places in the tree, the counts, the epoch.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "net/crypto.h"
#include "net/resolver.h"
#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

constexpr int kPublishTries = 10;
constexpr double kComeAgainSeconds = 1.5;
constexpr int kSmallestDegree = 8, kLargestDegree = 32;
constexpr int kFewContacts = 32;
// From its place to its address; an agent may be waiting for its port.
constexpr double kListenSeconds = kBindSeconds + 1;

std::string count_text(int n) {
  std::string s = std::to_string(n);
  for (int at = static_cast<int>(s.size()) - 3; at > 0; at -= 3)
    s.insert(static_cast<size_t>(at), ",");
  return s;
}

}  // namespace

int Session::expected_hosts() const {
  return std::max(1, config_.world_size / (config_.local_size > 0 ? config_.local_size : 8));
}

void Session::become_root() {
  loop_.cancel(root_back_timer_);
  // A contact goes on until our port is ours: a root that gives us a place has another rank 0.
  loop_.cancel(end_timer_);
  loop_.cancel(bind_timer_);
  root_ = std::make_unique<RootState>();
  std::string random = random_bytes(8);
  std::memcpy(&nonce_, random.data(), sizeof nonce_);
  nonce_ |= 1;  // never 0, which means: not placed
  index_ = 0;
  root_->host_of.assign(static_cast<size_t>(config_.world_size), -1);
  root_->pid_of.assign(static_cast<size_t>(config_.world_size), 0);
  int hosts = expected_hosts();
  degree_ = config_.degree > 0 ? config_.degree
                               : std::clamp(static_cast<int>(std::ceil(std::sqrt(hosts))),
                                            kSmallestDegree, kLargestDegree);
  root_->hosts.emplace_back();
  root_->hosts[0].hello = hello(kContact);
  root_->hosts[0].parent = -1;
  root_->hosts[0].reached = root_->hosts[0].listens = true;
  root_->parents.push_back(0);
  root_->leading = hosts <= 1 ? 1 : (hosts - 2) / degree_ + 1;
  listens_ = true;
  log("root of a world of " + std::to_string(config_.world_size) + " ranks, degree " +
      std::to_string(degree_));
  arm_progress(std::min(5.0, config_.world_size > 1 ? (first_deadline_ - now()) / 4 : 5.0));
  if (config_.root_kind == RootKind::kLocal) return root_is_bound();
  bind_root(now() + kBindSeconds);
}

void Session::bind_root(double until) {
  if (state_ != State::kJoining) return;
  if (std::string error = agent_.choose_interfaces(config_); !error.empty()) {
    no_root();
    return fail("join", "host " + config_.host_name + ": " + error);
  }
  std::vector<uint16_t> ports;
  if (config_.root_kind == RootKind::kEndpoint) {
    ports = config_.root_ports;
  } else if (config_.port != 0) {
    ports = {config_.port};
  }
  std::string error = agent_.listen_tcp(config_, ports, expected_hosts());
  if (error.empty()) return root_is_bound();
  if (now() > until) {
    std::string text =
        "host " + config_.host_name + " cannot listen as the root: " + error +
        "; choose another MASTER_PORT or COMMKIT_PORT on every rank, or stop its owner";
    if (config_.root_here == RootHere::kRankZero && ranks_.count(0) != 0) {
      text += " (rank 0 is claimed by pid " + std::to_string(ranks_[0]->pid) + " on this host)";
    }
    // If it is this job's own root that listens there, for a second rank 0, it must hear of us.
    no_root();
    if (config_.root_kind == RootKind::kEndpoint && !contact_ && !root_stream_) start_contact();
    return fail("join", text);
  }
  end_timer_ = loop_.after(kBindAgain, [this, until] { bind_root(until); });
}

void Session::drop_contact() {
  if (contact_) contact_->stop();
  if (contact_) loop_.defer([contact = std::move(contact_)] {});
  contact_.reset();
  if (root_stream_) root_stream_->close();
  root_stream_.reset();
}

void Session::no_root() {
  loop_.cancel(end_timer_);
  reported_.clear();
  reports_.clear();
  for (auto& host : root_->hosts) {
    loop_.cancel(host.lost_timer);
    if (host.contact) host.contact->close_when_sent();
  }
  root_.reset();
  nonce_ = 0;
  index_ = -1;
  agent_.contacts_changed();
}

void Session::root_is_bound() {
  drop_contact();
  root_->hosts[0].hello.addresses = agent_.addresses();
  root_->hosts[0].hello.port = agent_.port();
  publish_root(0);
  for (auto& conn : std::exchange(root_asked_, {})) {
    Writer w;
    w.str(own_root_text());
    conn->stream->send_frame(kRootIs, w.take());
  }
  for (auto& waiting : agent_.take_waiting_contacts())
    add_contact(waiting.stream, std::move(waiting.hello));
  if (!agent_.other_version().empty()) met_other_version(agent_.other_version());
  if (state_ == State::kJoining) report({});
}

// Without a proof, only a job's own name shows that it is one of those that we wait for.
void Session::met_other_version(const std::string& text) {
  if (root_ && !config_.job_id.empty() && config_.secret.empty()) fail_join("join", text);
}

std::string Session::own_root_text() const {
  return root_text(agent_.port(), agent_.addresses(), config_.machine);
}

void Session::publish_root(int tries) {
  std::string text = own_root_text();
  if (config_.root_kind == RootKind::kFile) {
    std::string temporary = config_.root_path + ".commkit." + std::to_string(getpid());
    std::ofstream out(temporary, std::ios::trunc);
    out << text << "\n";
    out.close();
    if (!out || std::rename(temporary.c_str(), config_.root_path.c_str()) != 0) {
      std::string why = std::strerror(errno);
      unlink(temporary.c_str());
      return fail_join("join", "host " + config_.host_name + " cannot write the rendezvous file " +
                                   config_.root_path + ": " + why);
    }
    root_->published = true;
    return;
  }
  if (config_.root_kind != RootKind::kElastic) return;
  uint64_t session = nonce_;
  // A session may end before the store answers; `session` tells.
  auto done = [this, session, tries](const std::string& error) {
    if (!is_session(session) || state_ != State::kJoining) return;
    if (error.empty()) return log("published in torchrun's store");
    if (tries < kPublishTries) {
      end_timer_ = loop_.after(0.2, [this, tries] { publish_root(tries + 1); });
      return;
    }
    std::string port = std::to_string(config_.root_ports.empty() ? 0 : config_.root_ports[0]);
    notice("log", "TORCHELASTIC_USE_AGENT_STORE is set, but no store answers at " +
                      config_.root_host + ":" + port + " (" + error +
                      "): the variable is stale, the root listens there itself");
    std::string failed = agent_.listen_tcp(config_, config_.root_ports);
    if (!failed.empty())
      fail_join("join", "host " + config_.host_name + " cannot listen as the root: " + failed);
  };
  std::weak_ptr<bool> alive = alive_;
  resolve(loop_, config_.root_host,
          [this, alive, done, text, tries](auto found, const std::string& error) {
            if (alive.expired()) return;
            if (!error.empty()) return done(error);
            // Another of its addresses each time: nobody may answer at the first.
            std::rotate(found.begin(), found.begin() + tries % static_cast<int>(found.size()),
                        found.end());
            for (auto& address : found)
              address.set_port(config_.root_ports.empty() ? 0 : config_.root_ports[0]);
            publish_in_store(loop_, found, root_store_key(config_), text,
                             [alive, done](const std::string& why) {
                               if (!alive.expired()) done(why);
                             });
          });
}

void Session::add_contact(StreamPtr stream, Hello h) {
  std::string wrong;
  if (h.world_size != config_.world_size) {
    wrong = "host " + h.host + " says the world size is " + std::to_string(h.world_size) +
            ", but host " + config_.host_name + " says " + std::to_string(config_.world_size) +
            "; start every rank with the same world size";
  } else if (h.placement != config_.placement) {
    wrong = placement_conflict("host " + h.host, h.placement, "host " + config_.host_name,
                               config_.placement);
  }
  if (!wrong.empty()) {
    Writer w;
    w.str("join").str(wrong);
    stream->send_frame(kFailDown, w.take());
    stream->close_when_sent();
    return fail_join("join", wrong);
  }
  std::string who = h.agent();
  auto [known, fresh] = root_->index_of.emplace(who, static_cast<int>(root_->hosts.size()));
  int index = known->second;
  if (fresh) {
    root_->hosts.emplace_back();
  } else if (auto& old = root_->hosts[static_cast<size_t>(index)]; old.reached || old.contact) {
    // Its first connection is not known to be broken yet; the agent itself knows better.
    if (old.contact) old.contact->close();
    if (!old.reached) --root_->contacts;
  }
  auto& host = root_->hosts[static_cast<size_t>(index)];
  loop_.cancel(host.lost_timer);
  host.hello = std::move(h);
  if (fresh) host.parent = choose_parent(index);
  host.contact = stream;
  host.reached = false;
  ++root_->contacts;
  agent_.contacts_changed();
  stream->on_frames([this, index](uint16_t type, std::string_view payload) {
    root_contact_frame(index, type, payload);
  });
  stream->on_close([this, index](const std::string& why) {
    auto& host = root_->hosts[static_cast<size_t>(index)];
    host.contact.reset();
    if (host.reached || state_ != State::kJoining) return;
    reached(host);
    host.reached = false;
    // It may come again: connections break, and an agent that lost its own starts over.
    host.lost_timer = loop_.after(kComeAgainSeconds, [this, index, why] {
      const auto& gone = root_->hosts[static_cast<size_t>(index)];
      if (state_ != State::kJoining || gone.reached || gone.contact) return;
      fail_join("join", "host " + gone.hello.host + " was lost while joining: " + why);
    });
  });
  place(index, false);
}

void Session::reached(RootState::Host& host) {
  if (host.reached) return;
  host.reached = true;
  --root_->contacts;
  agent_.contacts_changed();
}

void Session::root_contact_frame(int index, uint16_t type, std::string_view payload) {
  auto& host = root_->hosts[static_cast<size_t>(index)];
  Reader r(payload);
  if (type == kAccepted) {
    reached(host);
    host.contact->close();  // at once: its end of it may be long in coming
    host.contact.reset();
  } else if (type == kListens) {
    listens(index, r);
  } else if (type == kUnreachable) {
    std::string why = r.str();
    log("host " + host.hello.host + " cannot reach its parent on host " +
        root_->hosts[static_cast<size_t>(host.parent)].hello.host + ": " + why);
    place(index, true);
  } else if (type == kFailUp) {
    std::string kind = r.str(), text = r.str();
    fail_join(kind, text);
  }
}

int Session::most_contacts() const {
  return kFewContacts + static_cast<int>(3 * std::sqrt(expected_hosts()));
}

// In order of arrival, under the first agent that listens and has room.  Only agents that will have
// children listen: the first to come, as many as the expected hosts need, and where there are more
// hosts than that, each of the rest, so that room never runs out.
int Session::choose_parent(int index) {
  auto& host = root_->hosts[static_cast<size_t>(index)];
  auto& room = root_->parents;
  int parent = room.empty() ? 0 : room.front();
  if (++root_->hosts[static_cast<size_t>(parent)].children >= degree_ && !room.empty())
    room.pop_front();
  bool parenthood = index < root_->leading || index >= expected_hosts();
  if (parenthood) room.push_back(index);
  host.listens = parenthood || host.hello.port != 0;  // or did so in an earlier epoch
  return parent;
}

void Session::place(int index, bool under_root) {
  auto& host = root_->hosts[static_cast<size_t>(index)];
  if (under_root) host.parent = 0;
  auto& parent = root_->hosts[static_cast<size_t>(host.parent)];
  // The parent has been told to listen, and will say where.
  if (host.parent == 0 || parent.hello.port != 0) return send_place(index);
  parent.awaited.push_back(index);
  await_parent(index);
}

void Session::await_parent(int index) {
  std::weak_ptr<bool> alive = alive_;
  loop_.after(kListenSeconds, [this, alive, index] {
    if (alive.expired() || state_ != State::kJoining) return;
    const auto& child = root_->hosts[static_cast<size_t>(index)];
    const auto& late = root_->hosts[static_cast<size_t>(child.parent)];
    if (!child.contact || child.parent == 0 || late.hello.port != 0) return;
    if (!late.placed) return await_parent(index);  // it waits for its own parent
    log("host " + late.hello.host + " does not say where it listens: host " + child.hello.host +
        " goes under the root");
    place(index, true);
  });
}

void Session::listens(int index, Reader& r) {
  auto& host = root_->hosts[static_cast<size_t>(index)];
  host.hello.addresses = r.strs();
  host.hello.port = r.u16();
  if (!host.listens || host.hello.port == 0) throw BadFrame("an address that was not asked for");
  if (state_ != State::kJoining) return;
  for (int child : std::exchange(host.awaited, {})) {
    const auto& waiting = root_->hosts[static_cast<size_t>(child)];
    if (waiting.contact && waiting.parent == index) send_place(child);
  }
}

void Session::send_place(int index) {
  auto& host = root_->hosts[static_cast<size_t>(index)];
  int parent = host.parent;
  const Hello& up = root_->hosts[static_cast<size_t>(parent)].hello;
  std::vector<std::string> usable;
  for (const auto& address : up.addresses) {
    auto parsed = SocketAddress::parse(address, 0);
    // A loopback address means something only inside one network namespace.
    if (parsed && (!parsed->is_loopback() || up.machine == host.hello.machine))
      usable.push_back(address);
  }
  if (parent != 0 && usable.empty()) {
    log("host " + up.host + " has no address that host " + host.hello.host +
        " could use (only loopback: see its /etc/hosts and COMMKIT_IFNAME)");
    parent = 0;
  }
  host.parent = parent;
  host.placed = true;
  Writer w;
  w.u64(nonce_).i32(index).i32(degree_).i32(parent).str(
      root_->hosts[static_cast<size_t>(parent)].hello.host);
  w.u8(parent == 0 ? 1 : 0).strs(usable).u16(up.port).u8(host.listens ? 1 : 0);
  host.contact->send_frame(kWelcome, w.take());
  if (parent != 0) return;
  auto link = std::make_shared<Link>();
  link->stream = std::move(host.contact);
  host.contact.reset();
  reached(host);
  link->index = index;
  link->host = host.hello.host;
  link->open = true;
  children_[index] = link;
  link_frames(link);
  start_beats();
}

// Its agent had perhaps given this connection up before we read of it: while we stood still, or at
// the next of several ports.
void Session::child_may_return(const LinkPtr& link, const std::string& text) {
  children_.erase(link->index);
  auto& host = root_->hosts[static_cast<size_t>(link->index)];
  loop_.cancel(host.lost_timer);
  host.lost_timer =
      loop_.after(kComeAgainSeconds, [this, text] { fail_join("join", text + ", while joining"); });
}

// ---------------------------------------------------------------- counts

std::string Session::where(int rank) const {
  int host = root_->host_of[static_cast<size_t>(rank)];
  return "pid " + std::to_string(root_->pid_of[static_cast<size_t>(rank)]) + " on host " +
         root_->hosts[static_cast<size_t>(host)].hello.host;
}

void Session::count_in(const std::vector<HostReport>& reports) {
  for (const auto& r : reports) {
    if (r.index < 0 || r.index >= static_cast<int>(root_->hosts.size())) continue;
    auto& host = root_->hosts[static_cast<size_t>(r.index)];
    for (const auto& [rank, pid] : r.ranks) {
      if (rank < 0 || rank >= config_.world_size) continue;
      auto& owner = root_->host_of[static_cast<size_t>(rank)];
      if (owner >= 0) {
        return fail_join(
            "join",
            "rank " + std::to_string(rank) + " is claimed by " + where(rank) + " and by pid " +
                std::to_string(pid) + " on host " + host.hello.host + "; " + missing_text() +
                "; every process needs a rank of its own (is the node rank set on each host?)");
      }
      owner = r.index;
      root_->pid_of[static_cast<size_t>(rank)] = pid;
      ++host.joined;
      ++root_->joined;
    }
  }
  if (root_->joined == config_.world_size) form();
}

std::string Session::missing_text() const {
  RankSet missing;
  for (int rank = 0; rank < config_.world_size; ++rank) {
    if (root_->host_of[static_cast<size_t>(rank)] < 0) missing.add(rank);
  }
  std::string text =
      count_text(root_->joined) + " of " + count_text(config_.world_size) + " ranks joined";
  if (!missing.empty()) text += "; missing: " + missing.named();
  std::string partial, there;
  int shown = 0;
  for (size_t i = 0; i < root_->hosts.size(); ++i) {
    const auto& host = root_->hosts[i];
    if (host.hello.local_size > 0 && host.joined < host.hello.local_size) {
      if (++shown <= 8) {
        partial += (partial.empty() ? "" : ", ") + host.hello.host + " has " +
                   std::to_string(host.joined) + " of its " + std::to_string(host.hello.local_size);
      }
    }
  }
  if (shown > 8) partial += " and " + std::to_string(shown - 8) + " more hosts";
  if (!partial.empty()) text += " (" + partial + ")";
  shown = 0;
  for (size_t i = 0; i < root_->hosts.size() && root_->joined > 0; ++i) {
    const auto& host = root_->hosts[i];
    if (host.joined == 0 || ++shown > 4) continue;
    RankSet ranks;
    for (int rank = 0; rank < config_.world_size; ++rank) {
      if (root_->host_of[static_cast<size_t>(rank)] == static_cast<int>(i)) ranks.add(rank);
    }
    there += (there.empty() ? "" : ", ") + ranks.text(8) + " on " + host.hello.host;
  }
  if (shown > 4) there += " and on " + std::to_string(shown - 4) + " more hosts";
  if (!there.empty()) text += "; joined: " + there;
  if (!agent_.other_version().empty()) text += "; " + agent_.other_version();
  return text;
}

void Session::form() {
  uint64_t epoch = (static_cast<uint64_t>(agent_.boot_nonce()) << 32) | agent_.next_epoch();
  int hosts = static_cast<int>(root_->hosts.size());
  log("the world has formed: " + std::to_string(config_.world_size) + " ranks on " +
      std::to_string(hosts) + " hosts, epoch " + std::to_string(epoch) + ", after " +
      std::to_string(now() - started_) + " s");
  go(epoch, hosts, std::min(hosts, root_->leading));
}

// What interior agents need to find any rank's host: made when the first of them asks.
std::string Session::table_text() {
  std::vector<RankSet> ranks(root_->hosts.size());
  for (int rank = 0; rank < config_.world_size; ++rank) {
    ranks[static_cast<size_t>(root_->host_of[static_cast<size_t>(rank)])].add(rank);
  }
  Writer w;
  w.u32(static_cast<uint32_t>(ranks.size()));
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto& host = root_->hosts[i];
    w.i32(i == 0 ? -1 : host.parent);
    ranks[i].encode(w);
    bool reachable = host.listens;
    w.strs(reachable ? host.hello.addresses : std::vector<std::string>{});
    w.u16(reachable ? host.hello.port : 0);
  }
  return w.take();
}

}  // namespace commkit
