// A single-threaded event loop over epoll: descriptors, timers, and tasks posted by other threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace commkit {

// Seconds on the monotonic clock.
double now();

// What has something to do once a few events have been handled.
class AtEnd {
 public:
  virtual void at_end() = 0;

 protected:
  ~AtEnd() = default;
};

class Loop {
 public:
  using Ready = std::function<void(uint32_t events)>;
  using Task = std::function<void()>;
  using TimerId = uint64_t;

  Loop();
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // The callback may unwatch any descriptor, its own included.
  void watch(int fd, uint32_t events, Ready ready);
  void modify(int fd, uint32_t events);
  void unwatch(int fd);

  TimerId after(double seconds, Task task);
  void cancel(TimerId id);

  // Runs the task after the current callback has returned: the way to destroy what is running.
  void defer(Task task);
  // The same from another thread.
  void post(Task task);

  // After a few dozen of the events that have come together: what they send to one peer can go out
  // at once.  Only from within run(); see `in_round`.
  void at_end(std::weak_ptr<AtEnd> who) { ends_.push_back(std::move(who)); }
  bool in_round() const { return in_round_; }

  void run();
  void stop() { running_ = false; }
  void resume() { running_ = true; }  // before another run()

 private:
  struct Watch {
    uint32_t generation;
    // Shared, so that a callback may unwatch itself without a copy being made for every event.
    std::shared_ptr<Ready> ready;
  };

  void drain_posted();
  void run_deferred();
  void run_ends();
  int run_timers();  // milliseconds to the next one, -1: none

  int epoll_ = -1;
  int wake_ = -1;
  bool running_ = true;
  uint32_t generation_ = 0;
  std::unordered_map<int, Watch> watches_;
  // A timer's id is its slot and the slot's generation; a cancelled one leaves its entry in the
  // heap.
  struct Timer {
    uint32_t generation = 0;
    Task task;
  };
  struct Due {
    double at;
    TimerId id;
    bool operator<(const Due& other) const {
      return at > other.at || (at == other.at && id > other.id);
    }
  };
  bool waits(TimerId id) const;
  Task take_timer(TimerId id);
  std::vector<Timer> timers_;
  std::vector<uint32_t> free_timers_;
  std::vector<Due> due_;  // a heap, the next one first
  std::vector<Task> deferred_;
  std::vector<std::weak_ptr<AtEnd>> ends_, ending_;
  bool in_round_ = false;
  std::mutex mutex_;  // guards posted_
  std::vector<Task> posted_;
};

}  // namespace commkit
