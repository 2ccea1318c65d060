// A set of ranks, kept and shown as ranges: "0-7,12,96-103".
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "net/codec.h"

namespace commkit {

constexpr int kMostRanks = 1 << 24;

class RankSet {
 public:
  static RankSet all(int world_size);

  void add(int rank) { add(rank, rank); }
  void add(int low, int high);
  void add(const RankSet& other);
  void remove(const RankSet& other);
  bool contains(int rank) const;
  bool covers(const RankSet& other) const;
  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int first() const { return ranges_.begin()->first; }
  bool operator==(const RankSet& other) const { return ranges_ == other.ranges_; }

  // At most `most` ranges, then "and N more".
  std::string text(size_t most = 16) const;
  // "rank 5" or "ranks 3,5-7".
  std::string named(size_t most = 16) const;

  void encode(Writer& w) const;
  static RankSet decode(Reader& r);

  const std::map<int, int>& ranges() const { return ranges_; }  // low -> high, both inside

 private:
  std::map<int, int> ranges_;
  int size_ = 0;
};

}  // namespace commkit
