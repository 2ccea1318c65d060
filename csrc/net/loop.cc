#include "net/loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace commkit {

namespace {

[[noreturn]] void fail(const char* call) {
  throw std::runtime_error(std::string(call) + ": " + std::strerror(errno));
}

constexpr int kFullRounds = 64;
constexpr int kEventsToAnEnd = 64;

// The generation tells an event of a closed descriptor from one of its successor with the same
// number.
uint64_t pack(int fd, uint32_t generation) {
  return (static_cast<uint64_t>(generation) << 32) | static_cast<uint32_t>(fd);
}

}  // namespace

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

Loop::Loop() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) fail("epoll_create1");
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) fail("eventfd");
  watch(wake_, EPOLLIN, [this](uint32_t) {
    uint64_t count;
    while (read(wake_, &count, sizeof count) > 0) {
    }
    drain_posted();
  });
}

Loop::~Loop() {
  close(wake_);
  close(epoll_);
}

void Loop::watch(int fd, uint32_t events, Ready ready) {
  uint32_t generation = ++generation_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = pack(fd, generation);
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) < 0) fail("epoll_ctl add");
  watches_[fd] = Watch{generation, std::make_shared<Ready>(std::move(ready))};
}

void Loop::modify(int fd, uint32_t events) {
  auto it = watches_.find(fd);
  if (it == watches_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = pack(fd, it->second.generation);
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void Loop::unwatch(int fd) {
  if (watches_.erase(fd) > 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
}

Loop::TimerId Loop::after(double seconds, Task task) {
  uint32_t slot = static_cast<uint32_t>(timers_.size());
  if (free_timers_.empty()) {
    timers_.emplace_back();
  } else {
    slot = free_timers_.back();
    free_timers_.pop_back();
  }
  Timer& timer = timers_[slot];
  ++timer.generation;  // so that no id is 0
  timer.task = std::move(task);
  TimerId id = pack(static_cast<int>(slot), timer.generation);
  due_.push_back({now() + seconds, id});
  std::push_heap(due_.begin(), due_.end());
  return id;
}

bool Loop::waits(TimerId id) const {
  auto slot = static_cast<uint32_t>(id);
  return slot < timers_.size() && timers_[slot].generation == id >> 32 && timers_[slot].task;
}

Loop::Task Loop::take_timer(TimerId id) {
  auto slot = static_cast<uint32_t>(id);
  Task task = std::move(timers_[slot].task);
  timers_[slot].task = nullptr;
  free_timers_.push_back(slot);
  return task;
}

void Loop::cancel(TimerId id) {
  if (!waits(id)) return;
  Task last = take_timer(id);  // destroyed at the end: it may own what cancels more
  if (due_.size() < 64 || due_.size() < 4 * (timers_.size() - free_timers_.size())) return;
  due_.erase(
      std::remove_if(due_.begin(), due_.end(), [this](const Due& d) { return !waits(d.id); }),
      due_.end());
  std::make_heap(due_.begin(), due_.end());
}

void Loop::defer(Task task) { deferred_.push_back(std::move(task)); }

void Loop::post(Task task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted_.push_back(std::move(task));
  }
  uint64_t one = 1;
  ssize_t ignored = write(wake_, &one, sizeof one);
  (void)ignored;  // a full counter wakes the loop as well
}

void Loop::drain_posted() {
  std::vector<Task> tasks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks.swap(posted_);
  }
  for (auto& task : tasks) task();
}

void Loop::run_deferred() {
  while (!deferred_.empty()) {
    std::vector<Task> tasks;
    tasks.swap(deferred_);
    for (auto& task : tasks) task();
  }
}

void Loop::run_ends() {
  while (!ends_.empty()) {
    ending_.swap(ends_);
    for (auto& weak : ending_) {
      if (auto who = weak.lock()) who->at_end();
    }
    ending_.clear();
    run_deferred();
  }
}

int Loop::run_timers() {
  // Only what is due now: a timer that sets itself again must not keep the descriptors waiting.
  double due = now();
  while (!due_.empty()) {
    Due first = due_.front();
    if (waits(first.id) && first.at > due) {
      double wait = first.at - now();
      return wait <= 0 ? 0 : static_cast<int>(std::min(wait * 1000 + 1, 60000.0));
    }
    std::pop_heap(due_.begin(), due_.end());
    due_.pop_back();
    if (!waits(first.id)) continue;
    Task task = take_timer(first.id);
    task();
    run_deferred();
  }
  return -1;
}

void Loop::run() {
  std::array<epoll_event, 256> events;
  int full = 0;  // rounds in a row that have taken all that fits
  in_round_ = true;
  while (running_) {
    run_deferred();
    // What has come counts before what is overdue: a loop that is behind must not take the news
    // that it has not read for news that did not come.  But timers are not put off for ever.
    int wait = 0;
    if (full % kFullRounds == 0) wait = run_timers();
    run_ends();
    if (!running_) break;
    int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait);
    if (count < 0 && errno != EINTR) fail("epoll_wait");
    full = count == static_cast<int>(events.size()) ? full + 1 : 0;
    for (int i = 0; i < count && running_; ++i) {
      int fd = static_cast<int>(static_cast<uint32_t>(events[i].data.u64));
      auto it = watches_.find(fd);
      if (it == watches_.end() || it->second.generation != events[i].data.u64 >> 32) continue;
      std::shared_ptr<Ready> ready = it->second.ready;
      (*ready)(events[i].events);
      run_deferred();
      if (i % kEventsToAnEnd == kEventsToAnEnd - 1) run_ends();
    }
  }
  run_deferred();
  run_ends();
  in_round_ = false;
}

}  // namespace commkit
