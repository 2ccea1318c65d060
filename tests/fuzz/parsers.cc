// Every decoder of a whole text or payload, one by one: the first byte chooses.
#include <cstring>

#include "fuzz/input.h"
#include "net/address.h"
#include "overlay/config.h"
#include "overlay/contact.h"
#include "overlay/hello.h"
#include "overlay/protocol.h"
#include "overlay/rank_set.h"
#include "overlay/session.h"
#include "wire/key_table.h"

namespace {

using namespace commkit;
using fuzz::require;

void address(fuzz::Input& in) {
  auto port = static_cast<uint16_t>(in.number(2));
  std::string text = in.rest();
  auto one = SocketAddress::parse(text, port);
  if (!one) return;
  require(one->port() == port, "an address keeps its port");
  scope_name(one->scope());
  one->unmapped().text();
  auto again = SocketAddress::parse(one->ip(), port);
  require(again && again->ip() == one->ip(), "an address reads what it writes");
}

void names(fuzz::Input& in) {
  std::string name = in.some(32), pattern = in.some(64);
  matches_interface(pattern, name);
  std::vector<InterfaceAddress> all;
  while (!in.done() && all.size() < 16) {
    InterfaceAddress one;
    one.name = in.some(16);
    one.prefix = in.u8();
    one.flags = static_cast<unsigned>(in.number(4));
    if (auto parsed = SocketAddress::parse(in.some(40), 0)) one.address = *parsed;
    all.push_back(one);
  }
  choose_addresses(all, pattern);
}

void published(fuzz::Input& in) {
  std::string machine = in.some(16);
  for (const auto& one : parse_root_text(in.rest(), machine)) {
    require(one.port() != 0, "a published address has a port");
    require(!one.is_loopback() || !machine.empty(), "loopback is for the same machine only");
  }
}

void config(fuzz::Input& in) {
  std::string bytes = in.rest();
  Reader r(bytes);
  try {
    Config c = Config::parse(get_fields(r));
    require(c.world_size >= 1 && c.heartbeat > 0, "a configuration is within its bounds");
    c.job_hash();
    require(c.agent_name().size() < 100, "an agent's name fits into a socket's");
  } catch (const std::invalid_argument&) {
  }
}

void ranks(fuzz::Input& in) {
  std::string bytes = in.rest();
  Reader r(bytes);
  RankSet a = RankSet::decode(r), b = RankSet::decode(r);
  RankSet both = a;
  both.add(b);
  require(both.size() <= a.size() + b.size() && both.size() >= a.size(), "the size of a union");
  RankSet left = both;
  left.remove(b);
  require(left.size() == both.size() - b.size(), "the size of a difference");
  for (const auto& [low, high] : a.ranges()) {
    require(both.contains(low) && both.contains(high), "a union contains its parts");
    require(b.contains(low) != left.contains(low), "a difference lacks what was removed");
  }
  both.named();
  Writer w;
  both.encode(w);
  std::string again = w.take();
  Reader back(again);
  require(RankSet::decode(back) == both, "a set of ranks reads what it writes");
}

void table(fuzz::Input& in) {
  KeyTable keys;
  KvRequest set, push, wait;
  set.op = KvOp::kSet;
  set.key = "k";
  push.op = KvOp::kQueuePush;
  push.key = "q";
  wait.op = KvOp::kWait;
  wait.key = "w";
  keys.apply(std::move(set), [](KvReply&&) {});
  keys.apply(std::move(push), [](KvReply&&) {});
  int answered = 0;
  keys.apply(std::move(wait), [&answered](KvReply&&) { ++answered; });
  std::string before = keys.dump();
  try {
    keys.restore(in.rest());
  } catch (const BadFrame&) {
    require(keys.dump() == before && answered == 0, "a broken dump changes nothing");
  }
  KeyTable copy;
  copy.restore(keys.dump());
  auto a = keys.counters(), b = copy.counters();
  require(a.keys == b.keys && a.queues == b.queues && a.bytes == b.bytes, "a dump is complete");
}

void messages(fuzz::Input& in) {
  uint8_t which = in.u8();
  std::string bytes = in.rest(), nonce;
  Reader r(bytes);
  switch (which % 5) {
    case 0: {
      Hello hello = Hello::decode(bytes, nonce);
      require(hello.encode(nonce) == bytes || hello.secret, "a hello is nothing but its fields");
      break;
    }
    case 1:
      Loss::decode(r);
      break;
    case 2:
      get_request(r);
      break;
    case 3:
      get_reply(r);
      break;
    default:
      r.strs();
  }
}

void sums(fuzz::Input& in) {
  std::vector<Loss> losses;
  Loss all;
  while (!in.done()) {
    Loss one;
    int low = in.u8();
    one.ranks.add(low, low + in.u8());
    for (size_t n = in.below(12); n > 0; --n) one.texts.push_back(in.some(8));
    all.merge(one);
  }
  require(all.texts.size() < 16, "texts of losses are few");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  void (*parsers[])(fuzz::Input&) = {address, names, published, config,
                                     ranks,   table, messages,  sums};
  try {
    parsers[in.below(8)](in);
  } catch (const BadFrame&) {
    // The one way to refuse a payload.
  }
  return 0;
}
