// Which version this build is: of the frames it speaks, and of the release it belongs to.
#pragma once

#include <cstdint>
#include <string>

namespace commkit {

// In the header of every frame (stream.h).  Goes up with any change of what agents and ranks say,
// but for the few messages that protocol.h lists as fixed.
uint16_t protocol_version();
// As commkit/version.py has it.
const char* release();
// "commkit 0.1.0 (protocol 1)", and the same of a peer that has told both.
std::string version_text();
std::string version_text(const std::string& release, uint16_t protocol);

}  // namespace commkit
