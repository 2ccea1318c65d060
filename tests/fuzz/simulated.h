// Time and chance under the harness's control, so that an input always does the same: the linker
// sends clock_gettime, getrandom and usleep here (--wrap).
#pragma once

#include <functional>

#include "net/loop.h"

namespace fuzz {

// From now on CLOCK_MONOTONIC stands still, but for advance(); random numbers start over.
void freeze();
void advance(double seconds);

// Turns of the loop without waiting: every descriptor that is ready, every timer that is due.
// False: what runs on the loop has stopped it, and it is not to be run again.
bool turn(commkit::Loop& loop, int turns = 1);

}  // namespace fuzz
