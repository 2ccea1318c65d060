// One epoch of the world, as this host's agent takes part in it.
//
//   Joining  local ranks come, the root is found, the tree grows, counts of joined ranks climb
//   Formed   the root has minted the epoch: operations, keys, losses travel along the tree
//   Failed   the join or the host's place in the tree is lost; the ranks have been told
// It is over when own ranks and the subtree have left, or have been told of the failure.
//
// session_join.cc: joining as every agent sees it.  session_root.cc: as the root does.
// session_fail.cc: deadlines, progress, failure.  session_ops.cc: gather, broadcast, agree, probes.
// session_keys.cc: keys.  session_routes.cc: the way to their owners.  session_life.cc: messages,
// heartbeats, losses.  session_leave.cc: leaving, the end.  session_handover.cc: leaving before the
// agents below.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "overlay/contact.h"
#include "overlay/hello.h"
#include "overlay/rank_conn.h"
#include "overlay/rank_set.h"
#include "wire/key_table.h"
#include "wire/key_value.h"

namespace commkit {

class Agent;

enum class State { kJoining, kFormed, kFailed };

// Another agent to which this one is connected.
struct Link {
  StreamPtr stream;
  int index = -1;
  std::string host;
  RankSet ranks;        // child: its whole subtree
  bool left = false;    // child: its subtree has left and its keys are here
  bool failed = false;  // child: has said that its join failed, and why
  std::string failed_text;
  bool acked = false;   // mesh and parent: has confirmed that we leave
  bool broken = false;  // mesh: could not be reached, the tree is used instead
  bool open = false;
  bool ready = false;  // child: has reached our parent, to whom it could go
  bool moved = false;  // child: has gone to our parent
  bool waits = false;  // what it says is held until its time has come
  std::vector<std::pair<uint16_t, std::string>> held;
  std::vector<std::string> queued;  // mesh: frames to send once open
  std::shared_ptr<Dialer> dialer;
  double heard = 0;
};
using LinkPtr = std::shared_ptr<Link>;

struct HostReport {
  int index = 0;
  std::vector<std::pair<int, int>> ranks;  // rank, pid
};

// What an interior agent knows of another host.
struct TableEntry {
  int parent = -1;
  std::vector<std::string> addresses;  // empty but for interior agents
  uint16_t port = 0;
};

// Ranks that are gone without having left.  What happens at one time travels together: a job that
// is killed as a whole must not send a message for every rank to every host.
struct Loss {
  RankSet ranks;
  std::vector<std::string> texts;  // none: the processes ended in good order
  void merge(const Loss& other);
  void encode(Writer& w) const;
  static Loss decode(Reader& r);
};

// Fences are operations of the agents' own: no rank's tag begins like this.
constexpr const char* kFenceTag = "\1fence/";
inline bool is_fence(const std::string& tag) { return tag.rfind(kFenceTag, 0) == 0; }

// An agent of the previous job or epoch may still hold the port: one whose join has failed lingers
// for three seconds.
constexpr double kBindSeconds = 5.0, kBindAgain = 0.1;

class Session {
 public:
  Session(Agent& agent, const Config& config);
  ~Session();

  bool root() const { return root_ != nullptr; }
  // True if this rank belongs to this epoch; false: it must wait for the next.
  bool takes(const RankConn& conn) const;
  void add_rank(const RankPtr& conn);
  void rank_frame(const RankPtr& conn, uint16_t type, std::string_view payload);
  void rank_ended(const RankPtr& conn, const std::string& how);

  // Agent connections whose hello has been verified.
  const std::string& host_name() const { return config_.host_name; }
  // At the root: a host of this job has come that runs another version of commkit.
  void met_other_version(const std::string& text);
  bool takes_contacts() const { return root() && state_ == State::kJoining; }
  void add_contact(StreamPtr stream, Hello hello);
  // Contacts under way to their places, and how many the root takes on at one time: enough that
  // their round trips overlap, and few beside the connections that stay.
  int contacts() const { return root_ ? root_->contacts : 0; }
  int most_contacts() const;
  void add_child(StreamPtr stream, const Hello& hello);
  void add_mesh(StreamPtr stream, const Hello& hello);
  bool is_session(uint64_t nonce) const { return nonce_ != 0 && nonce == nonce_; }
  bool is_host(const std::string& name) const { return name == config_.host_name; }
  bool unplaced() const { return state_ == State::kJoining && nonce_ == 0; }

  // The store's view of a rank, by the token that begins its keys; null: no such rank.
  KeyValue* keys_of(std::string_view token);
  std::string any_token() const { return by_token_.empty() ? "" : by_token_.begin()->first; }
  void stop(const std::string& why);
  Fields inspect() const;
  uint64_t operations() const { return asked_; }
  std::string summary() const;  // for a rank that waits for the next epoch

 private:
  class RankKeys;
  struct RootState {
    struct Host {
      Hello hello;
      StreamPtr contact;  // until it has reached its parent
      int parent = 0;
      int children = 0;
      int joined = 0;
      bool listens = false;      // is to have children
      bool placed = false;       // has been told its parent
      std::vector<int> awaited;  // children that wait for its address
      bool reached = false;
      Loop::TimerId lost_timer = 0;
    };
    std::vector<Host> hosts;                        // by index; 0 is this one
    std::unordered_map<std::string, int> index_of;  // machine, host and pid of an agent
    std::vector<int> host_of;                       // rank -> index, -1
    std::vector<int> pid_of;                        // rank -> pid
    std::deque<int> parents;                        // listening, with room for children
    int leading = 1;                                // hosts that listen whoever comes after them
    int joined = 0;
    int contacts = 0;  // placed, and not yet with their parents
    bool published = false;
  };
  struct Op {
    OpKind kind = kGather;
    int peer = -1;
    RankSet arrived;
    std::map<int, std::string> payloads;  // gather: rank -> payload
    struct Class {
      std::string digest, description;
      int count = 0, first = 0;
    };
    std::vector<Class> classes;  // agree
    std::optional<std::vector<std::string>> result;
    std::map<int, uint64_t> callers;  // local rank -> its request id
    std::set<int> delivered;
    std::vector<uint64_t> timers;
    bool sent = false;
  };
  struct ProbeAnswer {
    RankSet arrived;
    int64_t number = 0;
    bool complete = true;  // every agent has answered
    std::vector<std::string> keys;
  };
  struct Probe {
    ProbeKind kind = kProbeOp;
    std::string tag;
    LinkPtr from;  // null: asked here
    int waiting = 0;
    ProbeAnswer answer;
    std::function<void(ProbeAnswer&&)> done;
    Loop::TimerId timer = 0;
  };
  struct KeyCall {
    KvRequest request;
    KeyValue::Done done;
    std::function<void(const std::string& why)> fail;
    double since = now();
    uint64_t table_id = 0;                 // waits in our own table
    LinkPtr link;                          // or was sent to this one
    bool carrier = false;                  // carries the waits of merged_[key]
    bool merged = false;                   // is one of those waits
    std::pair<int, uint64_t> from{-1, 0};  // link index and id there, of what another agent asked
  };
  struct MergedWait {
    uint64_t upstream = 0;
    std::set<uint64_t> waiters;
  };

  // session_join.cc and session_root.cc
  void start_contact();
  int expected_hosts() const;
  void become_root();
  void bind_root(double until);
  void root_is_bound();
  void publish_root(int tries);
  std::string own_root_text() const;
  void contact_held(StreamPtr stream);
  void contact_frame(uint16_t type, std::string_view payload);
  void welcome(std::string_view payload);
  void listen(double until, std::function<void()> then);
  void joined_parent(StreamPtr stream, int parent_index, const std::string& host);
  void root_contact_frame(int index, uint16_t type, std::string_view payload);
  void drop_contact();
  void no_root();
  void place(int index, bool under_root);
  void await_parent(int index);
  int choose_parent(int index);
  void listens(int index, Reader& r);
  void send_place(int index);
  void child_may_return(const LinkPtr& link, const std::string& text);
  void link_frames(const LinkPtr& link);
  void link_frame(const LinkPtr& link, uint16_t type, std::string_view payload);
  static LinkPtr accept(StreamPtr stream, const Hello& hello);
  void report(std::vector<HostReport> reports);
  void flush_reports();
  void count_in(const std::vector<HostReport>& reports);
  void form();
  void go(uint64_t epoch, int hosts, int interior);
  std::string table_text();
  void reached(RootState::Host& host);
  Dialer::Terms terms() const;
  void deliver_formed();
  std::string missing_text() const;
  std::string own_address() const;
  std::vector<std::string> addresses_at(int fd) const;
  StreamPtr uplink() const { return parent_ ? parent_->stream : root_stream_; }
  std::string where(int rank) const;
  Hello hello(HelloKind kind) const;

  // session_fail.cc
  void arm_deadline(double deadline);
  void deadline_passed();
  void arm_progress(double seconds);
  void progress();
  void notice(const std::string& kind, const std::string& text);
  void to_children(uint16_t type, const std::string& payload);
  void fail_join(const std::string& kind, const std::string& text);
  void fail(const std::string& kind, const std::string& text);

  // session_ops.cc
  void rank_op(const RankPtr& conn, std::string_view payload);
  void contribute(const std::string& tag, Op& op, int rank, std::string payload,
                  std::string description);
  void send_op_up(const std::string& tag, Op& op);
  void merge_class(Op& op, const Op::Class& c);
  void advance(const std::string& tag);
  void op_up(const LinkPtr& link, std::string_view payload);
  void finish(const std::string& tag, Op& op);
  void op_down(std::string_view payload);
  void deliver(const std::string& tag);
  void op_failed(const std::string& tag, const std::string& kind, const std::string& text);
  void op_expired(const std::string& tag);
  void fail_ops(const std::string& kind, const std::string& text);
  void close_op(const std::string& tag);
  void probe(ProbeKind kind, const std::string& tag, std::function<void(ProbeAnswer&&)> done);
  void probe_down(const LinkPtr& from, std::string_view payload);
  void probed(std::string_view payload);
  void probe_answered(uint64_t id);

  // session_keys.cc
  uint64_t call(KeyCall call);
  void dispatch(uint64_t id);
  void send_on(const LinkPtr& link, uint16_t type, std::string payload);
  std::shared_ptr<RankKeys> make_rank_keys(const RankPtr& conn);
  void cancel_call(uint64_t id);
  void awaited(uint64_t id, KvReply& reply, double read);
  void answer(uint64_t id, KvReply&& reply);
  void fail_call(uint64_t id, const std::string& why);
  void key_request(const LinkPtr& link, std::string_view payload);
  void key_reply(const LinkPtr& link, std::string_view payload);
  void key_cancel(const LinkPtr& link, std::string_view payload);
  void reroute(const LinkPtr& gone);
  void reroute_table();
  void give_back(uint64_t id);
  void give_back_waits();
  void cancel_calls_of(const LinkPtr& link);
  void key_moved(const LinkPtr& link, std::string_view payload);
  void fail_calls(const std::string& why);
  void rank_key(const RankPtr& conn, std::string_view payload);

  // session_routes.cc
  LinkPtr route(const std::string& key);  // null: our own table
  LinkPtr toward(int index);
  LinkPtr mesh(int index);
  int alive(int index) const;
  bool listening(int index) const;
  LinkPtr tree_hop(int index);
  int parent_of(int index) const;
  int host_of(int rank) const;
  void ask_for_table();
  void table_asked(const LinkPtr& link);
  void table_came(std::string_view payload);
  void mesh_frames(const LinkPtr& link);
  void catch_up();

  // session_leave.cc
  void rank_connected(const RankPtr& conn, std::string_view payload);
  void await_fence(const std::string& group, const RankSet& members);
  void fence_open(const std::string& group);
  void rank_leave(const RankPtr& conn, double timeout);
  void try_leave(const RankPtr& conn, bool late);
  void child_leaving(const LinkPtr& link, std::string_view payload);
  void check_over();
  void start_leaving();
  void finish_leaving();
  void over();
  RankSet absent() const;
  void advance_fences();

  // session_handover.cc
  enum class Handover { kNone, kAsked, kPreparing, kMoving };
  bool ranks_have_gone() const;
  bool subtree_has_left() const;
  void told_to_leave(const RankPtr& conn, bool open);
  void release_leaves();
  void hand_over_in(double seconds = -1);
  void ask_handover();
  void take_over_answered(std::string_view payload);
  void parent_ready(const LinkPtr& link, const std::string& why);
  void child_moved(const LinkPtr& link);
  void advance_handover();
  void call_off(const std::string& why);
  void handover_asked(const LinkPtr& link);
  bool adopts(int index) const;
  void promise_over(int index);
  void adopt(const LinkPtr& from, Reader& r);
  void new_parent(const LinkPtr& link, std::string_view payload);
  void say_parent_ready(const std::string& why);
  void drop_new_parent();
  void move();
  void old_parent_left();
  void stay(const LinkPtr& link);
  void read_held(const LinkPtr& link);

  // session_life.cc
  void start_beats();
  void beat();
  void link_lost(const LinkPtr& link, const std::string& why);
  void lose(Loss loss);
  void flush_losses();
  void loss_down(std::string_view payload);
  void loss_here(const Loss& loss);

  RankSet local_ranks() const;
  RankSet subtree() const;
  void log(const std::string& text);

  Agent& agent_;
  Loop& loop_;
  Config config_;  // the first joining rank's
  State state_ = State::kJoining;
  uint64_t nonce_ = 0;
  double started_;
  std::map<int, RankPtr> ranks_;
  std::vector<RankPtr> extras_;  // claim a rank that is taken: told of the failure they cause
  std::vector<RankPtr> root_asked_;
  std::vector<Greeted> early_;  // children that were told of us before we were
  std::unique_ptr<RootState> root_;
  std::shared_ptr<Contact> contact_;
  StreamPtr root_stream_;  // the contact, until the parent is reached
  std::shared_ptr<Dialer> parent_dialer_;
  int index_ = -1;
  LinkPtr parent_;
  std::map<int, LinkPtr> children_;
  std::map<int, LinkPtr> mesh_;
  // From agents that have heard before us that the world has formed, and have dialled us.
  struct AheadOfUs {
    std::weak_ptr<Link> link;
    uint16_t type;
    std::string payload;
  };
  std::vector<AheadOfUs> ahead_;
  Handover handover_ = Handover::kNone;
  std::set<int> promised_;           // children whose children we are about to take over
  std::map<int, LinkPtr> adopted_;   // those, until their parent leaves
  LinkPtr new_parent_, old_parent_;  // while our parent hands us over
  std::shared_ptr<Dialer> new_parent_dialer_;
  std::vector<std::pair<RankPtr, bool>> held_leaves_;  // and whether their fences were open
  std::vector<HostReport> reports_;                    // not yet sent up
  std::set<int> reported_;                             // local ranks already reported
  Loop::TimerId report_timer_ = 0, deadline_timer_ = 0, progress_timer_ = 0, beat_timer_ = 0,
                end_timer_ = 0, bind_timer_ = 0, root_back_timer_ = 0, handover_timer_ = 0,
                hold_timer_ = 0;
  double first_deadline_ = 0, report_at_ = 0;
  bool deadline_said_ = false;

  uint64_t epoch_ = 0;
  int hosts_ = 0;
  int degree_ = 0;
  int interior_ = 1;       // agents, the first to come, that listen and own keys by hash
  bool listens_ = false;   // may have children and be asked directly
  std::string interface_;  // of the address that this host uses; several hosts only
  // Interior agents only, once they have asked for it.
  std::vector<TableEntry> table_;
  std::vector<int> host_of_rank_;
  std::map<std::string, Op> ops_;
  std::map<std::string, std::pair<std::string, std::string>> failed_ops_;  // tag -> kind, text
  std::deque<std::string> failed_order_;
  std::deque<std::string> closed_ops_;  // tags already sent up, for probes
  std::map<uint64_t, Probe> probes_;
  uint64_t next_probe_ = 0;
  KeyTable keys_;
  std::map<uint64_t, KeyCall> calls_;
  std::map<std::string, MergedWait> merged_;
  std::map<std::pair<int, uint64_t>, uint64_t> incoming_;  // KeyCall::from -> our id
  uint64_t next_call_ = 0;
  uint64_t asked_ = 0;  // requests for keys: of ranks, of other agents, and of this agent's fences
  std::string table_bytes_;           // as it came, for children that ask
  std::vector<LinkPtr> table_asked_;  // children that wait for it
  bool table_wanted_ = false;
  std::set<int> gone_;  // agents that left and handed their keys to their parent
  std::map<std::string, std::shared_ptr<RankKeys>> by_token_;

  Loss pending_loss_;
  Loop::TimerId loss_timer_ = 0;
  std::vector<std::string> losses_;
  RankSet dead_;
  std::set<std::string> open_groups_, awaited_fences_;
  std::map<std::string, RankSet> confirmed_;  // group -> local members that are connected
  std::string root_said_;  // while it was not yet our parent: how far the join has come
  std::string farewell_;   // failed before the root was reached: what it is still to hear
  std::string announced_;  // the last loss that was announced as a death
  double leaving_since_ = 0, beat_due_ = 0;
  bool leaving_ = false;
  bool over_ = false;
  std::shared_ptr<bool> alive_ =
      std::make_shared<bool>(true);  // for callbacks that outlive the session
};

}  // namespace commkit
