// SHA-256 (FIPS 180-4), HMAC-SHA-256 (RFC 2104), comparison in constant time, random bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace commkit {

// 32 bytes.
std::string sha256(std::string_view data);
std::string hmac_sha256(std::string_view key, std::string_view data);

// Takes as long for equal strings as for different ones of the same length.
bool equal_in_constant_time(std::string_view a, std::string_view b);

// From the kernel's generator; waits for its seed at early boot.  Throws SystemError.
std::string random_bytes(size_t count);

}  // namespace commkit
