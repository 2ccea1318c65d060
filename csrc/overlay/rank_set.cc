#include "overlay/rank_set.h"

#include <algorithm>
#include <iterator>

namespace commkit {

RankSet RankSet::all(int world_size) {
  RankSet set;
  if (world_size > 0) set.add(0, world_size - 1);
  return set;
}

void RankSet::add(int low, int high) {
  auto it = ranges_.upper_bound(low);
  if (it != ranges_.begin() && std::prev(it)->second >= low - 1) it = std::prev(it);
  while (it != ranges_.end() && it->first <= high + 1) {
    low = std::min(low, it->first);
    high = std::max(high, it->second);
    size_ -= it->second - it->first + 1;
    it = ranges_.erase(it);
  }
  ranges_[low] = high;
  size_ += high - low + 1;
}

void RankSet::add(const RankSet& other) {
  for (const auto& [low, high] : other.ranges_) add(low, high);
}

void RankSet::remove(const RankSet& other) {
  RankSet left;
  auto cut = other.ranges_.begin();
  for (const auto& range : ranges_) {
    int low = range.first, high = range.second;
    while (cut != other.ranges_.end() && cut->second < low) ++cut;
    for (auto it = cut; it != other.ranges_.end() && it->first <= high; ++it) {
      if (it->first > low) left.add(low, it->first - 1);
      low = it->second + 1;
    }
    if (low <= high) left.add(low, high);
  }
  *this = std::move(left);
}

bool RankSet::contains(int rank) const {
  auto it = ranges_.upper_bound(rank);
  return it != ranges_.begin() && std::prev(it)->second >= rank;
}

bool RankSet::covers(const RankSet& other) const {
  auto it = ranges_.begin();
  for (const auto& [low, high] : other.ranges_) {
    while (it != ranges_.end() && it->second < high) ++it;
    if (it == ranges_.end() || it->first > low) return false;
  }
  return true;
}

std::string RankSet::text(size_t most) const {
  std::string out;
  size_t shown = 0;
  int counted = 0;
  for (const auto& [low, high] : ranges_) {
    if (shown++ == most) return out + " and " + std::to_string(size_ - counted) + " more";
    if (!out.empty()) out += ",";
    out += std::to_string(low);
    if (high > low) out += "-" + std::to_string(high);
    counted += high - low + 1;
  }
  return out;
}

std::string RankSet::named(size_t most) const {
  return (size_ == 1 ? "rank " : "ranks ") + text(most);
}

void RankSet::encode(Writer& w) const {
  w.u32(static_cast<uint32_t>(ranges_.size()));
  for (const auto& [low, high] : ranges_) w.i32(low).i32(high);
}

RankSet RankSet::decode(Reader& r) {
  RankSet set;
  uint32_t count = r.count(8);
  for (uint32_t i = 0; i < count; ++i) {
    int low = r.i32(), high = r.i32();
    if (low < 0 || high < low || high > kMostRanks)
      throw BadFrame("a range of ranks is out of order");
    set.add(low, high);
  }
  return set;
}

}  // namespace commkit
