// This user's agents in this network namespace, as `commkit agents` shows them.
#pragma once

#include <string>
#include <vector>

#include "overlay/protocol.h"

namespace commkit {

std::vector<std::string> agent_names();

// What an agent says of itself, and with `stop` that it ends; no fields where it does not answer.
Fields inspect_agent(const std::string& name, bool stop, double timeout);

}  // namespace commkit
