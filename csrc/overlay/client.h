// A rank's connection to its host's agent.  Thread-safe; a reader thread sorts what the agent says.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "overlay/protocol.h"
#include "overlay/rank_set.h"

namespace commkit {

constexpr double kTick = 0.1;  // between two looks at signals and deadlines

// kind: join, join-timeout, died, mismatch, timeout, agent, usage.
struct Failure : std::runtime_error {
  Failure(std::string k, const std::string& text) : std::runtime_error(text), kind(std::move(k)) {}
  std::string kind;
};

class Client {
 public:
  using Notice = std::function<void(const std::string& kind, const std::string& text)>;
  // Called about every 100 ms while waiting; may throw to give up (a signal).
  using Tick = std::function<void()>;

  // Connects to the agent, starting it where there is none, and asks to join.
  Client(const Fields& config, double timeout, Notice notice, const Tick& tick);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void formed(double timeout, const Tick& tick);
  Fields info();
  std::string root_endpoint(double timeout, const Tick& tick);

  // Payloads in rank order; empty unless this rank receives.
  std::vector<std::string> operation(OpKind kind, const std::string& tag, int peer, bool gives,
                                     std::string_view bytes, const std::string& description,
                                     double timeout, const Tick& tick);
  KvReply key(KvRequest request, double timeout, const Tick& tick);
  // Sets a key without waiting for the answer.
  void note(const std::string& key, const std::string& value);

  void creating(bool on);
  void connected(const std::string& group, const RankSet& members);
  bool leave(double timeout, const Tick& tick);
  void exiting(const std::string& reason);
  void close();
  std::vector<std::string> failures();
  // Whether the caller is inside a notice.
  bool on_reader() const;
  // No notice is passed on any more: the interpreter is about to end.
  void mute();

 private:
  // The agent answers at the deadline, having asked the root; only a sick one makes us give up by
  // ourselves.
  static constexpr double kGrace = 5.0;
  static constexpr double kShortSend = 5.0;  // for messages that nobody waits for
  static constexpr const char* kNotReading =
      "this host's agent does not read what it is sent; is it stopped?";

  static uint32_t milliseconds(double seconds) {
    return static_cast<uint32_t>(std::clamp(seconds * 1000, 0.0, 4e9));
  }

  struct Answer {
    bool done = false;
    uint16_t type = 0;
    std::string payload;
  };

  void start_reader();
  void read_loop();
  bool wait_for_input(int milliseconds);
  bool read_some();
  void broke(const std::string& why);
  bool settled();
  void tell_next_agent(const std::string& why);
  void frame_in(uint16_t type, std::string_view payload);
  void send(uint16_t type, const std::string& payload, double timeout, const Tick& tick);
  // Waits until `ready` or the deadline (false).  Throws what ended the connection.
  bool wait(std::unique_lock<std::mutex>& lock, double timeout, const Tick& tick,
            const std::function<bool()>& ready);
  void check_usable() const;
  [[noreturn]] void throw_broken() const;
  static void read_answer(const Answer& answer, uint16_t type,
                          const std::function<void(Reader&)>& read);
  uint64_t expect_answer();  // the id of the next request
  Answer request(uint16_t type, uint64_t id, const std::string& payload, double timeout,
                 const Tick& tick);

  std::string agent_, program_;         // its name, and what starts it
  std::function<std::string()> hello_;  // the first message to it
  bool ended_ = false;                  // the agent, before the world had formed
  int fd_ = -1;
  int wake_ = -1;
  std::unique_ptr<std::thread> reader_;  // from the moment that the world has formed
  std::string in_;                       // what has been read and is no whole frame yet
  Notice notice_;
  std::mutex mutex_;
  std::timed_mutex send_mutex_;
  std::mutex close_mutex_;
  // On the heap, so that a forked child can leave it alone: its waiters do not exist there.
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::atomic<bool> forked_{false};
  std::atomic<bool> muted_{false};
  std::atomic<bool> closed_{false};
  std::atomic<std::thread::id> reader_id_{};
  bool formed_ = false;
  bool left_ = false, left_open_ = false;
  std::string broken_kind_, broken_;  // why the connection or the world is unusable
  Fields info_;
  std::string log_;  // a pattern, until the agent says which file
  std::string root_;
  bool root_known_ = false;
  uint64_t next_ = 0;
  std::map<uint64_t, Answer> answers_;
  std::vector<std::string> failures_;
  friend void clients_forked();
};

}  // namespace commkit
