// The groups of one rank in the set that Megatron-LM makes (benchmarks/_group_set.py), and the key
// under which each of them exchanges its id, as long as commkit's own.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace megatron {

struct Shape {
  int tp = 0, dp = 0, pp = 0;
  int ranks() const { return tp * dp * pp; }
};

// `visit(family, lowest rank, members, place of this rank)` for each group of more than one rank.
inline void groups_of(
    const Shape& s, int rank,
    const std::function<void(const char* family, int lowest, int members, int place)>& visit) {
  int t = rank % s.tp, d = rank / s.tp % s.dp, p = rank / (s.tp * s.dp);
  int column = t + s.tp * d, stage = s.tp * s.dp * p;
  auto group = [&](const char* family, int lowest, int members, int place) {
    if (members > 1) visit(family, lowest, members, place);
  };
  group("dp", stage + t, s.dp, d);
  group("mp", s.tp * d, s.tp * s.pp, t + s.tp * p);
  group("tp", stage + s.tp * d, s.tp, t);
  group("pp", column, s.pp, p);
  if (p == 0 || p == s.pp - 1) group("embd", column, s.pp > 1 ? 2 : 1, p == 0 ? 0 : 1);
  group("tp-dp", stage, s.tp * s.dp, column);
}

inline std::string id_key(const char* family, int lowest) {
  uint64_t mark = 0xcbf29ce484222325ull;
  for (const char* c = family; *c != '\0'; ++c)
    mark = (mark ^ static_cast<uint64_t>(static_cast<unsigned char>(*c))) * 0x100000001b3ull;
  mark = (mark ^ static_cast<uint64_t>(lowest)) * 0x100000001b3ull;
  char text[96];
  std::snprintf(text, sizeof text, "commkit:%d/ck:%s:%024llx:0/cuda//0", lowest, family,
                static_cast<unsigned long long>(mark));
  return text;
}

}  // namespace megatron
