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
  watches_[fd] = Watch{generation, std::move(ready)};
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
  TimerId id = ++next_timer_;
  double at = now() + seconds;
  timers_.emplace(std::make_pair(at, id), std::move(task));
  timer_times_.emplace(id, at);
  return id;
}

void Loop::cancel(TimerId id) {
  auto it = timer_times_.find(id);
  if (it == timer_times_.end()) return;
  timers_.erase({it->second, id});
  timer_times_.erase(it);
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

int Loop::run_timers() {
  // Only what is due now: a timer that sets itself again must not keep the descriptors waiting.
  double due = now();
  while (!timers_.empty()) {
    auto it = timers_.begin();
    double wait = it->first.first - due;
    if (wait > 0) {
      wait = it->first.first - now();
      return wait <= 0 ? 0 : static_cast<int>(std::min(wait * 1000 + 1, 60000.0));
    }
    Task task = std::move(it->second);
    timer_times_.erase(it->first.second);
    timers_.erase(it);
    task();
    run_deferred();
  }
  return -1;
}

void Loop::run() {
  std::array<epoll_event, 256> events;
  while (running_) {
    run_deferred();
    int wait = run_timers();
    if (!running_) break;
    int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait);
    if (count < 0 && errno != EINTR) fail("epoll_wait");
    for (int i = 0; i < count && running_; ++i) {
      int fd = static_cast<int>(static_cast<uint32_t>(events[i].data.u64));
      auto it = watches_.find(fd);
      if (it == watches_.end() || it->second.generation != events[i].data.u64 >> 32) continue;
      // A copy: the callback may unwatch itself.
      Ready ready = it->second.ready;
      ready(events[i].events);
      run_deferred();
    }
  }
  run_deferred();
}

}  // namespace commkit
