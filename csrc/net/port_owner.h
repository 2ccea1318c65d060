// Which process holds a TCP port, for the error that says the port is taken.
#pragma once

#include <cstdint>
#include <string>

namespace commkit {

// "pid 123 (python3)", or "" where /proc does not allow to tell.
std::string port_owner(uint16_t port);

}  // namespace commkit
