// Finding or starting this host's agent.
#pragma once

#include <functional>
#include <string>

namespace commkit {

constexpr int kAgentListener = 3;

void close_from(int first);

// A connected Unix socket to the agent of this name, or -1 (nobody listens, or too many wait for an
// agent that does not accept).
int connect_agent(const std::string& name);
// Binds the name and starts the agent behind it.  False: another process was faster.  Throws on
// failure, and when the agent is not ready by the deadline; `tick` is called about ten times a
// second and may throw to give up.
bool start_agent(const std::string& name, const std::string& program, double deadline,
                 const std::function<void()>& tick);

}  // namespace commkit
