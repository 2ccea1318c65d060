// One host's agent: its listeners and logs, the ranks and agents that come to it, and one Session
// at a time.
//
// A Session is one epoch's world.  Ranks and contacts that come while a world is alive wait for the
// next one; when a session is over and nobody waits, the agent leaves.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "net/identity.h"
#include "net/loop.h"
#include "net/stream.h"
#include "overlay/config.h"
#include "overlay/hello.h"
#include "overlay/log.h"
#include "overlay/rank_conn.h"
#include "overlay/session.h"
#include "wire/store_session.h"

namespace commkit {

// The kernel takes the smaller of this and somaxconn.
constexpr int kTcpBacklog = 65535;

class Agent {
 public:
  // Takes over the listening abstract Unix socket, which the first local rank bound: it is the lock
  // that keeps a second agent of this job from starting.
  Agent(Loop& loop, int unix_listener);
  ~Agent();

  Loop& loop() { return loop_; }
  void log(const std::string& text) { log_.write(text); }
  const std::string& log_path() const { return log_.path(); }
  uint16_t store_port() const { return store_port_; }

  // Called by the session.
  const std::shared_ptr<Traffic>& traffic() const { return traffic_; }
  uint64_t accepted_total() const { return accepted_total_; }
  // Requests for keys that this epoch has had, from whomever.
  uint64_t operations() const { return session_ ? session_->operations() : 0; }
  // Contacts that the root has placed and that have not reached their parents: few at a time.
  void contacts_changed() { throttle(); }
  const std::vector<std::string>& addresses() const { return addresses_; }
  const std::string& source() const { return source_; }
  uint16_t port() const { return port_; }
  uint32_t boot_nonce() const { return nonce_; }
  uint32_t next_epoch() { return ++epochs_; }
  // Binds the root's port, or any port of the range when `ports` is empty or {0}.  "" or what went
  // wrong.
  // `hosts`: how many may connect at once.
  std::string listen_tcp(const Config& config, const std::vector<uint16_t>& ports, int hosts = 1);
  bool listening() const { return !tcp_.empty(); }
  // What COMMKIT_IFNAME allows: the address to dial from, those to be reached at.  "" or what is
  // wrong.
  std::string choose_interfaces(const Config& config);
  std::vector<Greeted> take_waiting_contacts();
  void not_root();
  const std::string& other_version() const { return other_version_; }
  // The interface that has this address, "" if none.
  std::string interface_of(const std::string& address);
  const std::string& store_host() const { return store_host_; }
  void session_over();
  void world_formed() { formed_at_ = now(); }
  // `told`: agents, and processes of this host, that have heard of it.
  void join_failed(const std::string& kind, const std::string& text, std::set<std::string> told);
  // Closes the store connections of these ranks, and of a rank only those that wait when
  // `waiting_only`.
  void drop_store(const std::string& token, bool waiting_only, const std::string& why);

 private:
  struct StoreConn {
    StreamPtr stream;
    std::unique_ptr<StoreSession> session;
  };

  void accept_unix(int fd);
  void accept_tcp(int fd, std::string peer);
  void accept_store(int fd, std::string peer);
  void rank_frame(const std::shared_ptr<RankConn>& conn, uint16_t type, std::string_view payload);
  void rank_joins(const std::shared_ptr<RankConn>& conn, std::string_view payload);
  void rank_gone(const std::shared_ptr<RankConn>& conn);
  void watch_processes();
  void watch_process(const std::shared_ptr<RankConn>& conn);
  void throttle();
  // A connection until it has shown who it is.
  struct Coming {
    bool young = true, spoke = false;
    double came = 0;
  };
  void age(const std::weak_ptr<Coming>& coming, uint64_t hellos);
  void grow(Coming& coming);
  bool drop_silent();
  bool share_port(int hosts, std::vector<int>& fds);
  void taken(StreamPtr stream, Hello hello);
  void place_waiting();
  std::string no_root_text() const;
  bool too_late(const std::string& who, double age) const;
  void stranger(const std::string& peer, const std::string& why);
  void met_other_version(const std::string& text);
  void rank_foreign(const std::shared_ptr<RankConn>& conn, uint16_t version, uint16_t type,
                    std::string_view payload);
  void stopped_by_hand(pid_t by);
  void leave_if_idle();
  void leave();
  Fields inspect() const;
  std::string listen_store();

  Loop& loop_;
  Log log_;
  uint32_t nonce_;
  uint32_t epochs_ = 0;
  double started_;
  bool served_ = false;
  struct {
    double at = 0;
    std::string kind, text;
    std::set<std::string> told;
  } failed_;              // the last join that failed
  double formed_at_ = 0;  // the last world
  Loop::TimerId linger_timer_ = 0;
  std::string name_;
  std::unique_ptr<Listener> unix_, store_;
  std::string store_host_ = "127.0.0.1";
  std::vector<std::unique_ptr<Listener>> tcp_;
  uint16_t port_ = 0, store_port_ = 0;
  std::vector<InterfaceAddress> interfaces_;
  std::vector<std::string> addresses_;
  std::string source_;
  Acceptor::Job job_;
  std::string other_version_;  // of commkit, on a host of this job; "": none was met
  std::unique_ptr<Session> session_;
  std::set<std::shared_ptr<RankConn>> conns_;
  std::deque<std::shared_ptr<RankConn>> waiting_;  // ranks of the next epoch
  std::deque<Greeted> waiting_contacts_;
  std::set<std::shared_ptr<StoreConn>> store_conns_;
  std::string join_fields_;  // of the last join request, encoded
  std::shared_ptr<const Config> join_config_;
  Loop::TimerId watch_timer_ = 0;
  int most_opening_ = 512;
  int opening_ = 0;  // TCP connections that have not shown who they are
  int young_ = 0;    // and of these, those that came just now
  uint64_t hellos_ = 0;
  struct Opening {
    std::weak_ptr<Coming> coming;
    std::weak_ptr<Stream> stream;
  };
  std::deque<Opening> opening_list_;  // the same, in the order of their coming
  uint64_t strangers_ = 0;
  uint64_t accepted_total_ = 0;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();  // with other agents
};

}  // namespace commkit
