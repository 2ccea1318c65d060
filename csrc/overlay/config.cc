#include "overlay/config.h"

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

#include "net/crypto.h"

namespace commkit {

namespace {

class Lookup {
 public:
  explicit Lookup(const Fields& fields) : fields_(fields) {}

  std::string text(const std::string& name, const std::string& fallback = "") const {
    auto it = fields_.find(name);
    return it == fields_.end() ? fallback : it->second;
  }

  double number(const std::string& name, double fallback, double low, double high) const {
    std::string value = text(name);
    if (value.empty()) return fallback;
    char* end = nullptr;
    double v = std::strtod(value.c_str(), &end);
    if (*end != '\0' || !(v >= low && v <= high)) {
      throw std::invalid_argument("join request: " + name + "=" + value + " is out of range");
    }
    return v;
  }

  int whole(const std::string& name, int fallback, int low, int high) const {
    return static_cast<int>(number(name, fallback, low, high));
  }

 private:
  const Fields& fields_;
};

}  // namespace

std::string hex_text(std::string_view bytes, size_t count) {
  static const char* digits = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < count && i < bytes.size(); ++i) {
    auto b = static_cast<unsigned char>(bytes[i]);
    out += digits[b >> 4];
    out += digits[b & 15];
  }
  return out;
}

Config Config::parse(const Fields& fields) {
  Lookup in(fields);
  Config c;
  c.job_id = in.text("job_id");
  c.host_key = in.text("host_key");
  c.host_name = in.text("host_name");
  c.machine = in.text("machine");
  std::string kind = in.text("root_kind", "local");
  if (kind == "local") {
    c.root_kind = RootKind::kLocal;
  } else if (kind == "endpoint") {
    c.root_kind = RootKind::kEndpoint;
  } else if (kind == "elastic") {
    c.root_kind = RootKind::kElastic;
  } else if (kind == "file") {
    c.root_kind = RootKind::kFile;
  } else if (kind == "published") {
    c.root_kind = RootKind::kPublished;
  } else {
    throw std::invalid_argument("join request: root_kind=" + kind + " is unknown");
  }
  c.root_host = in.text("root_host");
  std::string ports = in.text("root_ports");
  for (size_t at = 0; at < ports.size();) {
    size_t comma = ports.find(',', at);
    if (comma == std::string::npos) comma = ports.size();
    int port = std::atoi(ports.substr(at, comma - at).c_str());
    if (port < 0 || port > 65535) throw std::invalid_argument("join request: root_ports=" + ports);
    c.root_ports.push_back(static_cast<uint16_t>(port));
    at = comma + 1;
  }
  if (c.root_ports.empty() && (kind == "endpoint" || kind == "elastic")) {
    throw std::invalid_argument("join request: root_kind=" + kind + " without root_ports");
  }
  c.root_path = in.text("root_path");
  c.root_published = in.text("root_published");
  std::string here = in.text("root_here", "rank0");
  c.root_here = here == "yes" ? RootHere::kYes : here == "no" ? RootHere::kNo : RootHere::kRankZero;
  c.root_key = in.text("root_key");
  c.world_size = in.whole("world_size", 1, 1, 1 << 24);
  c.local_size = in.whole("local_size", -1, -1, 1 << 16);
  c.placement = in.text("placement");
  c.dns_patience = in.number("dns_patience", 10, 0, 1e9);
  c.ifname = in.text("ifname");
  c.port = static_cast<uint16_t>(in.whole("port", 0, 0, 65535));
  c.port_low = static_cast<uint16_t>(in.whole("port_low", 0, 0, 65535));
  c.port_high = static_cast<uint16_t>(in.whole("port_high", 0, 0, 65535));
  c.secret = in.text("secret");
  c.log_dir = in.text("log_dir");
  c.heartbeat = in.number("heartbeat", 10, 0.1, 3600);
  c.degree = in.whole("degree", 0, 0, 4096);
  return c;
}

std::string placement_conflict(const std::string& who, const std::string& placement,
                               const std::string& other, const std::string& others_placement) {
  auto digest = [](const std::string& text) { return text.substr(0, text.find(' ')); };
  if (digest(placement) == digest(others_placement)) return "";
  auto shown = [&](const std::string& text) {
    if (text.empty()) return std::string("none");
    size_t blank = text.find(' ');
    return (blank == std::string::npos ? "" : text.substr(blank + 1) + " ") + "(" +
           digest(text).substr(0, 12) + ")";
  };
  return who + " has the placement " + shown(placement) + ", but " + other + " has " +
         shown(others_placement) + "; give every rank the same topology= or COMMKIT_TOPOLOGY";
}

std::string Config::job_hash() const {
  // Without a job id, two users' jobs that meet at one port are at least told apart by user.
  // Those that meet at a file, by the file: an old one may name a port that another job has taken.
  return sha256(job_id.empty() ? "uid " + std::to_string(getuid()) + " " + root_path
                               : "job " + job_id);
}

std::string Config::agent_name() const {
  std::string whole = std::to_string(getuid()) + '\0' + root_key + '\0' + job_id + '\0' + host_key;
  return "commkit-" + std::to_string(getuid()) + "-" + hex_text(sha256(whole), 8);
}

}  // namespace commkit
