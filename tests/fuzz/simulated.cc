#include "simulated.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace {

bool frozen = false;
int64_t nanoseconds = 0;
uint64_t state = 0;

}  // namespace

extern "C" {
int __real_clock_gettime(clockid_t clock, timespec* out);
ssize_t __real_getrandom(void* buffer, size_t size, unsigned flags);

int __wrap_clock_gettime(clockid_t clock, timespec* out) {
  if (!frozen || clock != CLOCK_MONOTONIC) return __real_clock_gettime(clock, out);
  out->tv_sec = nanoseconds / 1000000000;
  out->tv_nsec = nanoseconds % 1000000000;
  return 0;
}

ssize_t __wrap_getrandom(void* buffer, size_t size, unsigned flags) {
  if (!frozen) return __real_getrandom(buffer, size, flags);
  for (size_t i = 0; i < size; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    static_cast<uint8_t*>(buffer)[i] = static_cast<uint8_t>(state >> 56);
  }
  return static_cast<ssize_t>(size);
}

int __wrap_usleep(useconds_t) { return 0; }
}

namespace fuzz {

void freeze() {
  frozen = true;
  nanoseconds = 1000ll * 1000000000;
  state = 1;
}

void advance(double seconds) { nanoseconds += static_cast<int64_t>(seconds * 1e9); }

bool turn(commkit::Loop& loop, int turns) {
  for (int i = 0; i < turns; ++i) {
    // A timer that is set while timers run is for the next turn: between the two the loop looks at
    // its descriptors once.
    bool mine = false;
    loop.after(0, [&loop, &mine] {
      advance(1e-6);
      loop.after(0, [&loop, &mine] {
        mine = true;
        loop.stop();
      });
    });
    loop.run();
    if (!mine) return false;
    loop.resume();
  }
  return true;
}

}  // namespace fuzz
