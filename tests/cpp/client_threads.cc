// One rank whose threads all use its Client at once: keys, operations, waits that are interrupted,
// failures, and at the end close() under those that still wait.  Run under ThreadSanitizer.
//
//   client_threads FIELD=VALUE... [seconds=N] [end=leave|close|exit|stay]
//
// The fields are those of a join (csrc/overlay/config.h), with rank, local_rank and agent.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "net/loop.h"
#include "overlay/client.h"

// ThreadSanitizer of GCC 12 does not see this way to lock, std::timed_mutex's, but the older one.
extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* until) noexcept {
  timespec now{}, there{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &there);
  there.tv_sec += until->tv_sec - now.tv_sec;
  there.tv_nsec += until->tv_nsec - now.tv_nsec;
  for (; there.tv_nsec < 0; there.tv_nsec += 1000000000) --there.tv_sec;
  for (; there.tv_nsec >= 1000000000; there.tv_nsec -= 1000000000) ++there.tv_sec;
  return pthread_mutex_timedlock(mutex, &there);
}

namespace {

using namespace commkit;

struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string take(Fields& fields, const std::string& name, const std::string& fallback) {
  auto it = fields.find(name);
  if (it == fields.end()) return fallback;
  std::string value = it->second;
  fields.erase(it);
  return value;
}

struct Counts {
  std::atomic<int> done{0}, failed{0}, interrupted{0}, notices{0};
};

// Until `over`, or until the world is gone.
void repeat(Counts& counts, const std::atomic<bool>& over, const std::function<void(int)>& call) {
  for (int round = 0; !over; ++round) {
    try {
      call(round);
      ++counts.done;
    } catch (const Interrupted&) {
      ++counts.interrupted;
    } catch (const Failure& failure) {
      ++counts.failed;
      if (failure.kind == "timeout") continue;
      return;
    }
  }
}

KvRequest request(KvOp op, const std::string& key, const std::string& value = "") {
  KvRequest q;
  q.op = op;
  q.key = key;
  q.value = value;
  q.amount = 1;
  return q;
}

}  // namespace

int main(int argc, char** argv) {
  Fields fields;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    size_t equal = word.find('=');
    if (equal == std::string::npos) {
      std::fprintf(stderr, "%s: expected FIELD=VALUE\n", argv[i]);
      return 2;
    }
    fields[word.substr(0, equal)] = word.substr(equal + 1);
  }
  double seconds = std::atof(take(fields, "seconds", "2").c_str());
  std::string end = take(fields, "end", "leave");
  int rank = std::atoi(fields["rank"].c_str());
  int world = std::atoi(fields["world_size"].c_str());
  Counts counts;
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0};
  try {
    Client client(
        fields, 30, [&](const std::string&, const std::string&) { ++counts.notices; }, nullptr);
    client.formed(30, nullptr);
    std::printf("formed\n");
    std::fflush(stdout);
    std::vector<std::thread> threads;
    auto start = [&](const std::function<void(int)>& call) {
      threads.emplace_back([&, call] { repeat(counts, over, call); });
    };
    std::string mine = "commkit:" + std::to_string(rank) + "/";
    for (int t = 0; t < 2; ++t) {
      start([&, t](int round) {
        std::string key = mine + std::to_string(t), value = std::to_string(round);
        client.key(request(KvOp::kSet, key, value), 20, nullptr);
        if (client.key(request(KvOp::kGet, key), 20, nullptr).value != value) ++wrong;
        client.key(request(KvOp::kAdd, "shared"), 20, nullptr);
      });
    }
    // Every rank gathers the same rounds, as long as all of them go on.
    start([&](int round) {
      auto out = client.operation(kGather, "gather#" + std::to_string(round), -1, true,
                                  std::to_string(rank), "", seconds + 2, nullptr);
      if (static_cast<int>(out.size()) != world) ++wrong;
    });
    start([&](int round) {
      client.operation(kAgree, "agree#" + std::to_string(round), -1, true, "d", "d", seconds + 2,
                       nullptr);
    });
    // A wait for what never comes: interrupted as by a signal, or at its deadline.
    start([&](int round) {
      double until = now() + 0.25;
      Client::Tick tick = [until] {
        if (now() > until) throw Interrupted("a signal");
      };
      client.key(request(KvOp::kWait, mine + "never"), round % 2 == 0 ? 60 : 0.05, tick);
    });
    start([&](int) {
      client.info();
      client.failures();
      client.creating(true);
      client.creating(false);
      usleep(2000);
    });
    // Still waiting when the client is closed.
    threads.emplace_back([&] {
      try {
        client.key(request(KvOp::kWait, mine + "end"), 300, nullptr);
      } catch (const Failure&) {
      }
    });
    double until = now() + seconds;
    while (now() < until && client.failures().empty()) usleep(20000);
    std::printf("done %d failed %d interrupted %d notices %d failures %zu\n", counts.done.load(),
                counts.failed.load(), counts.interrupted.load(), counts.notices.load(),
                client.failures().size());
    std::fflush(stdout);
    if (end == "exit") _exit(0);
    if (end == "abort") _exit(3);
    std::thread closer([&] {
      if (end == "leave") client.leave(5, nullptr);
      client.close();
    });
    if (end == "leave") client.exiting("");
    client.close();
    closer.join();
    over = true;
    for (auto& thread : threads) thread.join();
  } catch (const Failure& failure) {
    std::fprintf(stderr, "%s: %s\n", failure.kind.c_str(), failure.what());
    return 1;
  }
  return wrong == 0 ? 0 : 4;
}
