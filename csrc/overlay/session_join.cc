// Joining, as every agent sees it: local ranks come, the root and a parent are found, counts climb.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "net/crypto.h"
#include "net/version.h"
#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

// Reports that arrive together go up together.
constexpr double kBatchSeconds = 0.001;
// A host whose ranks are not all there reports those it has.
constexpr double kPartialSeconds = 0.2;
// A root that has given us a place and is gone does not come again after this long.
constexpr double kRootBackSeconds = 1.5;

}  // namespace

Session::Session(Agent& agent, const Config& config)
    : agent_(agent), loop_(agent.loop()), config_(config), started_(now()) {}

Session::~Session() {
  for (auto id : {report_timer_, deadline_timer_, progress_timer_, beat_timer_, end_timer_,
                  bind_timer_, loss_timer_, root_back_timer_, handover_timer_, hold_timer_}) {
    loop_.cancel(id);
  }
  for (auto& [rank, conn] : ranks_) loop_.cancel(conn->leave_timer);
  for (auto& [tag, op] : ops_) {
    for (auto id : op.timers) loop_.cancel(id);
  }
  for (auto& [id, probe] : probes_) loop_.cancel(probe.timer);
  if (contact_) contact_->stop();
  if (parent_dialer_) parent_dialer_->stop();
  if (root_stream_) root_stream_->close_when_sent();
  drop_new_parent();
  for (auto& link : {parent_, old_parent_}) {
    if (link) link->stream->close_when_sent();
  }
  for (auto* links : {&children_, &mesh_, &adopted_}) {
    for (auto& [index, link] : *links) {
      if (link->dialer) link->dialer->stop();
      if (link->stream) link->stream->close_when_sent();
    }
  }
  if (root_) {
    for (auto& host : root_->hosts) {
      loop_.cancel(host.lost_timer);
      if (host.contact) host.contact->close_when_sent();
    }
    if (root_->published && config_.root_kind == RootKind::kFile) unlink(config_.root_path.c_str());
  }
  for (auto& early : early_) early.stream->close();
}

void Session::log(const std::string& text) { agent_.log(text); }

bool Session::takes(const RankConn&) const { return state_ == State::kJoining; }

RankSet Session::local_ranks() const {
  RankSet set;
  for (const auto& [rank, conn] : ranks_) set.add(rank);
  return set;
}

RankSet Session::subtree() const {
  RankSet set = local_ranks();
  for (const auto& [index, link] : children_) set.add(link->ranks);
  return set;
}

Hello Session::hello(HelloKind kind) const {
  Hello h;
  h.kind = kind;
  h.job = config_.job_hash();
  h.session = nonce_;
  h.index = index_;
  h.world_size = config_.world_size;
  h.local_size = config_.local_size;
  h.placement = config_.placement;
  h.machine = config_.machine;
  h.host = config_.host_name;
  h.release = release();
  h.uid = getuid();
  h.pid = static_cast<uint32_t>(getpid());
  for (const auto& [rank, conn] : ranks_)
    h.born = h.born > 0 ? std::min(h.born, conn->born) : conn->born;
  h.secret = !config_.secret.empty();
  h.addresses = agent_.addresses();
  h.port = agent_.port();
  return h;
}

Dialer::Terms Session::terms() const {
  Dialer::Terms terms;
  terms.source = agent_.source();
  terms.secret = config_.secret;
  terms.traffic = agent_.traffic();
  return terms;
}

void Session::add_rank(const RankPtr& conn) {
  const Config& c = *conn->config;
  std::string who =
      "rank " + std::to_string(conn->rank) + " (pid " + std::to_string(conn->pid) + ")";
  if (c.world_size != config_.world_size) {
    extras_.push_back(conn);
    return fail_join("join", "on host " + config_.host_name + " " + who +
                                 " says the world size is " + std::to_string(c.world_size) +
                                 ", but " + "rank " + std::to_string(ranks_.begin()->first) +
                                 " says " + std::to_string(config_.world_size) +
                                 "; start every rank with the same world size");
  }
  if (c.placement != config_.placement) {
    std::string here = " on host " + config_.host_name;
    std::string why = placement_conflict(who + here, c.placement,
                                         "rank " + std::to_string(ranks_.begin()->first) + here,
                                         config_.placement);
    if (!why.empty()) {
      extras_.push_back(conn);
      return fail_join("join", why);
    }
  }
  if (auto it = ranks_.find(conn->rank); it != ranks_.end()) {
    extras_.push_back(conn);
    std::string text =
        "rank " + std::to_string(conn->rank) + " is claimed by pid " +
        std::to_string(it->second->pid) + " and by pid " + std::to_string(conn->pid) +
        ", both on host " + config_.host_name +
        "; every process needs a rank of its own (is the node rank set on each host?)";
    return fail_join("join", text);
  }
  ranks_[conn->rank] = conn;
  if (static_cast<int>(ranks_.size()) == config_.local_size || config_.local_size < 0) {
    log(local_ranks().named() + (config_.local_size < 0 ? " have come" : ": all of this host"));
  }
  arm_deadline(conn->deadline);
  // Under a root that has given us a place rank 0 is there already: it will say who both are.
  bool placed = nonce_ != 0;
  if (!root_ && !placed &&
      (config_.root_kind == RootKind::kLocal || config_.root_here == RootHere::kYes ||
       (config_.root_here == RootHere::kRankZero && conn->rank == 0))) {
    become_root();
  } else if (contact_) {
    contact_->born(conn->born);
  } else if (!root_ && !root_stream_ && !parent_) {
    start_contact();
  }
  if (state_ != State::kJoining) return;
  report({});
}

// ---------------------------------------------------------------- towards the root

void Session::start_contact() {
  std::string error = agent_.choose_interfaces(config_);
  arm_progress(5.0);
  Contact::Outcome outcome;
  outcome.held = [this](StreamPtr stream) { contact_held(std::move(stream)); };
  outcome.hopeless = [this](const std::string& why) {
    loop_.defer([contact = std::move(contact_)] { contact->stop(); });
    contact_.reset();
    if (root_) return;  // a stranger has our port for now
    fail("join", "host " + config_.host_name + ": " + why);
  };
  contact_ = Contact::start(loop_, config_, hello(kContact), terms(), outcome);
  // After the contact has begun: the root must hear that our ranks will not come.
  if (!error.empty()) fail("join", "host " + config_.host_name + ": " + error);
}

void Session::contact_held(StreamPtr stream) {
  log("the root at " + stream->peer() + " has answered");
  loop_.cancel(root_back_timer_);
  loop_.defer([contact = contact_] { contact->stop(); });
  contact_.reset();
  if (state_ == State::kFailed) {
    // What was left to say: why this host's ranks will not come.
    stream->send_frame(kFailUp, farewell_);
    stream->close_when_sent();
    return over();
  }
  root_stream_ = std::move(stream);
  root_stream_->on_frames(
      [this](uint16_t type, std::string_view payload) { contact_frame(type, payload); });
  root_stream_->on_close([this](const std::string& why) {
    root_stream_.reset();
    if (root_ || parent_ || state_ != State::kJoining) return;
    // The root of an epoch that ended while we waited for the next: its successor will come up.
    // One that had placed us was of this epoch, which is lost with it unless only the connection
    // is.
    bool placed = nonce_ != 0;
    log("lost the root while waiting " +
        std::string(placed ? "for the parent: " : "to be placed: ") + why);
    if (placed) {
      root_back_timer_ = loop_.after(kRootBackSeconds, [this, why] {
        if (state_ != State::kJoining || root_ || parent_ || root_stream_) return;
        fail("join", "host " + config_.host_name + " lost the root while joining: " + why);
      });
    }
    if (parent_dialer_) parent_dialer_->stop();
    parent_dialer_.reset();
    loop_.cancel(bind_timer_);
    nonce_ = 0;
    index_ = -1;
    start_contact();
  });
}

void Session::contact_frame(uint16_t type, std::string_view payload) {
  if (type == kWelcome) return welcome(payload);
  Reader r(payload);
  if (type == kFailDown) {
    std::string kind = r.str(), text = r.str();
    return fail(kind, text);
  }
  if (type != kProgress) return;
  root_said_ = r.str();
  notice("progress", root_said_);
}

void Session::welcome(std::string_view payload) {
  Reader r(payload);
  uint64_t nonce = r.u64();
  int index = r.i32(), degree = r.i32(), parent = r.i32();
  if (nonce == 0 || degree < 1 || parent < 0 || parent >= index || index > kMostRanks) {
    throw BadFrame("a place in the tree that cannot be");
  }
  std::string host = r.str();
  bool stay = r.u8() != 0;
  std::vector<std::string> addresses = r.strs();
  uint16_t port = r.u16();
  bool listens = r.u8() != 0;
  if (root_) no_root();  // there is another rank 0: it will say who both are
  listens_ = listens;
  agent_.not_root();
  nonce_ = nonce;
  index_ = index;
  degree_ = degree;
  log("agent " + std::to_string(index_) + ", parent " + std::to_string(parent) + " on host " +
      host);
  for (auto& early : std::exchange(early_, {})) {
    if (early.stream->closed()) continue;
    if (early.hello.session == nonce_) {
      add_child(early.stream, early.hello);
    } else {
      early.stream->close();
    }
  }
  if (stay) {
    joined_parent(root_stream_, parent, host);
    if (listens_) listen(now() + kBindSeconds, [] {});
    return;
  }
  std::vector<SocketAddress> to;
  for (const auto& address : addresses) {
    if (auto parsed = SocketAddress::parse(address, port)) to.push_back(*parsed);
  }
  Dialer::Outcome outcome;
  outcome.open = [this, parent, host](StreamPtr stream, uint16_t, const std::string&) {
    loop_.defer([dialer = std::move(parent_dialer_)] {});
    joined_parent(std::move(stream), parent, host);
  };
  outcome.failed = [this, host](const std::string& why, bool) {
    loop_.defer([dialer = std::move(parent_dialer_)] {});
    log("cannot reach the parent on host " + host + ": " + why);
    if (!root_stream_) return;
    Writer w;
    w.str(why);
    root_stream_->send_frame(kUnreachable, w.take());
  };
  auto dial = [this, to = std::move(to), outcome = std::move(outcome)] {
    parent_dialer_ = Dialer::dial(loop_, to, hello(kChild), terms(), outcome);
  };
  if (!listens_) return dial();
  // Before the parent is reached, since the root is then left.
  listen(now() + kBindSeconds, dial);
}

// Only who is to have children listens, and tells the root where; it is asked by the root alone.
void Session::listen(double until, std::function<void()> then) {
  uint64_t session = nonce_;
  auto up = uplink();
  if (state_ != State::kJoining || !up) return;
  std::string error = agent_.listen_tcp(config_, {});
  if (!error.empty()) {
    if (now() > until) {
      return fail_join("join", "host " + config_.host_name + " cannot listen: " + error);
    }
    loop_.cancel(bind_timer_);
    bind_timer_ = loop_.after(kBindAgain, [this, session, until, then = std::move(then)] {
      if (is_session(session)) listen(until, then);
    });
    return;
  }
  Writer w;
  w.strs(addresses_at(up->fd())).u16(agent_.port());
  up->send_frame(kListens, w.take());
  then();
}

void Session::joined_parent(StreamPtr stream, int parent_index, const std::string& host) {
  parent_ = std::make_shared<Link>();
  parent_->stream = std::move(stream);
  parent_->index = parent_index;
  parent_->host = host;
  parent_->open = true;
  if (root_stream_ && root_stream_ != parent_->stream) {
    root_stream_->send_frame(kAccepted, "");
    root_stream_->close_when_sent();
  }
  root_stream_.reset();
  loop_.cancel(progress_timer_);
  link_frames(parent_);
  start_beats();
  flush_reports();
  // What went wrong before there was anybody to tell.
  if (state_ == State::kJoining && deadline_said_) deadline_passed();
}

// Where the route to another agent leaves from is the best address to give to others.
std::vector<std::string> Session::addresses_at(int fd) const {
  std::vector<std::string> addresses = agent_.addresses();
  std::string mine = SocketAddress::local_of(fd).unmapped().ip();
  addresses.erase(std::remove(addresses.begin(), addresses.end(), mine), addresses.end());
  addresses.insert(addresses.begin(), mine);
  return addresses;
}

// The address from which this host reaches the others: the best to give to a transport, too.
std::string Session::own_address() const {
  if (parent_) return SocketAddress::local_of(parent_->stream->fd()).unmapped().ip();
  for (const auto& [index, link] : children_) {
    if (link->stream->closed()) continue;
    return SocketAddress::local_of(link->stream->fd()).unmapped().ip();
  }
  return "";
}

void Session::link_frames(const LinkPtr& link) {
  link->heard = now();
  std::weak_ptr<Link> weak = link;
  link->stream->on_frames([this, weak](uint16_t type, std::string_view payload) {
    auto self = weak.lock();
    if (!self) return;
    self->heard = now();
    if (self->waits) return self->held.emplace_back(type, payload), void();
    link_frame(self, type, payload);
  });
  link->stream->on_close([this, weak](const std::string& why) {
    if (auto self = weak.lock()) link_lost(self, why);
  });
}

// ---------------------------------------------------------------- under a parent

LinkPtr Session::accept(StreamPtr stream, const Hello& h) {
  stream->send_frame(kAccepted, "");
  auto link = std::make_shared<Link>();
  link->stream = std::move(stream);
  link->index = h.index;
  link->host = h.host;
  link->open = true;
  return link;
}

void Session::add_child(StreamPtr stream, const Hello& h) {
  if (unplaced()) {
    early_.push_back({std::move(stream), h});
    return;
  }
  auto known = children_.find(h.index);
  bool other = known != children_.end() && known->second->stream &&
               !known->second->stream->closed() &&
               (state_ != State::kJoining || known->second->host != h.host);
  other = other || (root_ && static_cast<size_t>(h.index) >= root_->hosts.size());
  if (h.index == index_ || (parent_ && h.index == parent_->index) || other) {
    log(stream->peer() + " on host " + h.host + " says that it is agent " +
        std::to_string(h.index) + ", which is another");
    return stream->close();
  }
  LinkPtr link = accept(std::move(stream), h);
  link->waits = adopts(h.index);
  (link->waits ? adopted_ : children_)[h.index] = link;
  link_frames(link);
  start_beats();
}

// ---------------------------------------------------------------- counts

void Session::report(std::vector<HostReport> reports) {
  for (auto& r : reports) reports_.push_back(std::move(r));
  bool all = config_.local_size > 0 && static_cast<int>(ranks_.size()) >= config_.local_size;
  // Nothing to wait for: a lone host, or the last rank of a leaf.
  if (all && (root_ || parent_) && children_.empty()) return flush_reports();
  bool partial = config_.local_size > 0 && !all && reports_.empty();
  double when = now() + (partial ? kPartialSeconds : kBatchSeconds);
  if (report_timer_ != 0 && when >= report_at_) return;
  loop_.cancel(report_timer_);
  report_at_ = when;
  report_timer_ = loop_.after(when - now(), [this] { flush_reports(); });
}

void Session::flush_reports() {
  loop_.cancel(report_timer_);
  report_timer_ = 0;
  if (state_ != State::kJoining || (!root_ && !parent_)) return;
  HostReport own;
  own.index = index_;
  for (const auto& [rank, conn] : ranks_) {
    if (reported_.insert(rank).second) own.ranks.emplace_back(rank, conn->pid);
  }
  if (!own.ranks.empty()) reports_.push_back(std::move(own));
  if (reports_.empty()) return;
  std::vector<HostReport> out = std::exchange(reports_, {});
  if (root_) return count_in(out);
  Writer w;
  w.u32(static_cast<uint32_t>(out.size()));
  for (const auto& r : out) {
    w.i32(r.index).u32(static_cast<uint32_t>(r.ranks.size()));
    for (const auto& [rank, pid] : r.ranks) w.i32(rank).i32(pid);
  }
  parent_->stream->send_frame(kUp, w.take());
}

void Session::go(uint64_t epoch, int hosts, int interior) {
  state_ = State::kFormed;
  agent_.world_formed();
  epoch_ = epoch;
  hosts_ = hosts;
  interior_ = interior;
  for (auto id : {deadline_timer_, progress_timer_, report_timer_, bind_timer_}) loop_.cancel(id);
  if (hosts_ > 1) interface_ = agent_.interface_of(own_address());
  Writer w;
  w.u64(epoch_).i32(hosts_).i32(interior_);
  std::string news = w.take();
  Writer none;
  none.str("join").str(
      "the world has formed without this host: others have its ranks; every "
      "process needs a rank of its own (is the node rank set on each host?)");
  std::string superfluous = none.take();
  for (auto& [index, link] : children_) {
    link->left = link->left || link->ranks.empty();
    link->stream->send_frame(link->left ? kFailDown : kGo, link->left ? superfluous : news);
  }
  deliver_formed();
  for (auto& [index, link] : children_) {
    if (!std::exchange(link->failed, false) || !link->stream->closed()) continue;
    // Its failure came too late to stop the world: its ranks are lost to one that has formed.
    std::string why = link->failed_text.empty() ? "gave up at its deadline" : link->failed_text;
    lose({link->ranks, {"host " + link->host + " is lost: " + why}});
  }
  for (auto& extra : std::exchange(extras_, {})) {
    Writer w;
    w.str("join").str("rank " + std::to_string(extra->rank) + " is already in the world");
    extra->stream->send_frame(kFailed, w.take());
  }
  catch_up();
}

void Session::deliver_formed() {
  // The launcher's local ranks are kept only if they make sense together; some are wrong, some are
  // missing.
  std::set<int> given;
  int size = static_cast<int>(ranks_.size());
  bool sound = true;
  for (const auto& [rank, conn] : ranks_) {
    given.insert(conn->local_rank);
    sound = sound && (conn->config->local_size < 0 || conn->config->local_size == size);
  }
  sound = sound && static_cast<int>(given.size()) == size && *given.begin() == 0 &&
          *given.rbegin() == size - 1;
  std::string token = hex_text(random_bytes(8));
  Fields common{
      {"epoch", std::to_string(epoch_)},   {"local_size", std::to_string(size)},
      {"hosts", std::to_string(hosts_)},   {"host_index", std::to_string(index_)},
      {"store_host", agent_.store_host()}, {"store_port", std::to_string(agent_.store_port())},
      {"interface", interface_},           {"agent_pid", std::to_string(getpid())},
      {"log", agent_.log_path()}};
  Writer encoded;
  for (const auto& [key, value] : common) encoded.str(key).str(value);
  std::string shared = encoded.take();
  int position = 0;
  for (auto& [rank, conn] : ranks_) {
    int local_rank = sound ? conn->local_rank : position;
    ++position;
    conn->token = token + "." + std::to_string(rank);
    Fields own{{"local_rank", std::to_string(local_rank)}, {"store_token", conn->token}};
    bool told = conn->local_rank >= 0 || conn->config->local_size >= 0;
    if (!sound && told &&
        (conn->local_rank != local_rank ||
         (conn->config->local_size >= 0 && conn->config->local_size != size))) {
      own["local_rank_was"] =
          std::to_string(conn->local_rank) + " of " + std::to_string(conn->config->local_size);
    }
    by_token_[conn->token] = make_rank_keys(conn);
    Writer w;
    w.u32(static_cast<uint32_t>(common.size() + own.size()));
    for (const auto& [key, value] : own) w.str(key).str(value);
    conn->stream->send_frame(kFormed, w.take() + shared);
  }
}

}  // namespace commkit
