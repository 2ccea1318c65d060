// What the joining ranks of a host tell their agent about the job, the same for all of them
// (commkit/overlay.py writes the fields, and beside them each rank's own: rank and local_rank).
#pragma once

#include <string>
#include <vector>

#include "overlay/protocol.h"

namespace commkit {

enum class RootKind { kLocal, kEndpoint, kElastic, kFile, kPublished };
enum class RootHere { kYes, kNo, kRankZero };

// The first `count` bytes, in hexadecimal.
std::string hex_text(std::string_view bytes, size_t count = 64);

struct Config {
  std::string job_id;
  std::string host_key;
  std::string host_name;
  std::string machine;
  RootKind root_kind = RootKind::kLocal;
  std::string root_host;
  std::vector<uint16_t> root_ports;
  std::string root_path;       // file
  std::string root_published;  // published: what the root wrote (root_text)
  RootHere root_here = RootHere::kRankZero;
  std::string root_key;
  int world_size = 1;
  int local_size = -1;
  // Digest of the order of hosts that moved the ranks, a blank, its file; "": none did.
  std::string placement;
  double dns_patience = 10;  // seconds; 0: until the deadline
  std::string ifname;
  uint16_t port = 0;  // the root's own port, 0: any
  uint16_t port_low = 0, port_high = 0;
  std::string secret;
  std::string log_dir;
  double heartbeat = 10;
  int degree = 0;  // 0: chosen by the root

  // Throws std::invalid_argument naming the field.
  static Config parse(const Fields& fields);

  // Equal for the agents of one job, and for no others.
  std::string job_hash() const;
  // The abstract Unix socket of this host's agent, without the leading NUL.
  std::string agent_name() const;
};

// Why ranks of two hosts, or two ranks, cannot be of one world; "" if both were moved alike.
std::string placement_conflict(const std::string& who, const std::string& placement,
                               const std::string& other, const std::string& others_placement);

}  // namespace commkit
