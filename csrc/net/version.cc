#include "net/version.h"

// The only file that knows the numbers: tests build another version from it and link the rest.
#ifndef COMMKIT_PROTOCOL_VERSION
#define COMMKIT_PROTOCOL_VERSION 1
#endif
#ifndef COMMKIT_RELEASE
#define COMMKIT_RELEASE "0.1.0"
#endif

namespace commkit {

uint16_t protocol_version() { return COMMKIT_PROTOCOL_VERSION; }

const char* release() { return COMMKIT_RELEASE; }

std::string version_text() { return version_text(release(), protocol_version()); }

std::string version_text(const std::string& release, uint16_t protocol) {
  std::string text = release.empty() ? "another commkit" : "commkit " + release;
  return text + " (protocol " + std::to_string(protocol) + ")";
}

}  // namespace commkit
