// Name look-up without blocking the loop, and never in reverse.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "net/address.h"
#include "net/loop.h"

namespace commkit {

// Calls `done` from the loop, with numeric addresses (IPv4 and IPv6, the resolver's order) or an
// error. The loop must outlive the look-up: a resolver cannot be interrupted.
void resolve(Loop& loop, const std::string& host,
             std::function<void(std::vector<SocketAddress>, std::string error)> done);

}  // namespace commkit
