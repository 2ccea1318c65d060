// Finding or starting this host's agent.
#pragma once

#include <string>

namespace commkit {

constexpr int kAgentListener = 3;

void close_from(int first);

// A connected Unix socket to the agent of this name, or -1 (nobody listens).
int connect_agent(const std::string& name);
// Binds the name and starts the agent behind it.  False: another process was faster.  Throws on
// failure.
bool start_agent(const std::string& name, const std::string& program);

}  // namespace commkit
