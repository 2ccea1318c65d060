// What ranks and agents say to one another.  Every message is one frame (net/stream.h); the
// payload's fields are listed in order behind each type.
//
// Two versions (net/version.h) understand of each other only what never changes, so that either can
// say which two have met: the header of a frame, kMagic, the beginning of a Hello (HelloStart), of
// kRankJoin only its magic, and kInspect, kStop, kInspected, kRefused and kFailed as a whole.  Who
// is asked answers in the asker's version.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "net/codec.h"
#include "wire/key_value.h"

namespace commkit {

constexpr uint32_t kMagic = 0x31484b43;  // "CKH1", first field of every first message
// A first message is small; nothing longer is read from a peer that has not shown who it is.
constexpr uint32_t kMaxHello = 64 * 1024;

enum Msg : uint16_t {
  // rank -> its host's agent, over an abstract Unix socket
  kRankJoin =
      1,  // magic, timeout ms, age of the process in ms, i32 rank, i32 local rank, config fields
  kRankOp = 2,   // id, OpKind, tag, timeout ms, i32 peer (dst or src), flag, payload, description
  kRankKey = 3,  // id, KvRequest
  kRankKeyCancel = 4,  // id
  kRankCreating = 5,   // flag
  kRankConnected = 6,  // group, RankSet members
  kRankLeave = 7,      // timeout ms
  kRankExiting = 8,    // reason
  kRankRoot = 9,       // -: asks for the root's endpoint
  kInspect = 10,       // magic
  kStop = 11,          // magic

  // agent -> rank
  kFormed = 32,     // info (key, value pairs)
  kFailed = 33,     // kind, text: the join or the whole epoch is over
  kNotice = 34,     // kind, text
  kOpDone = 35,     // id, list of payloads
  kOpFailed = 36,   // id, kind, text
  kKeyDone = 37,    // id, KvReply
  kLeft = 38,       // flag: every member had confirmed
  kRootIs = 39,     // endpoint
  kInspected = 40,  // info

  // agent -> agent, opening
  kHello = 64,        // Hello
  kChallenge = 65,    // nonce, mac
  kProof = 66,        // mac
  kHeld = 67,         // -: the root has taken the contact in and will answer later
  kRefused = 68,      // text, flag: trying again later may help
  kWelcome = 69,      // Welcome
  kUnreachable = 70,  // text: contact -> root: the parent given could not be reached
  kAccepted = 71,     // -: parent -> child; child -> root: the parent is reached
  kListens = 72,      // addresses, port: a contact that is to have children -> root

  // up the tree
  kUp = 80,         // list of HostReport
  kFailUp = 81,     // kind, text: the join cannot succeed ("": the root composes the text)
  kLostUp = 82,     // Loss
  kOpUp = 83,       // tag, OpKind, i32 peer, RankSet arrived, body
  kOpExpired = 84,  // tag
  kProbed = 85,     // probe id, ProbeAnswer
  kLeaving = 86,  // dump of the keys held, list of (i32 index, host, RankSet): children handed over
                  // (none: no list)
  kTableAsk = 87,
  kHandover = 88,     // -: take my children and keys
  kParentReady = 89,  // text: why the new parent cannot be reached; "": it has been
  kMoved = 90,        // -: the last word to an old parent, but about keys and probes

  // down the tree
  kGo = 96,           // epoch, i32 hosts, i32 interior agents
  kFailDown = 97,     // kind, text
  kProgress = 98,     // text
  kLossDown = 99,     // Loss
  kOpDown = 100,      // tag, OpKind, i32 dst, body
  kOpFailDown = 101,  // tag, kind, text
  kProbe = 102,       // probe id, ProbeKind, tag
  kLeavingAck = 103,
  kTable = 104,      // the root's list of hosts, for interior agents that asked
  kTakeOver = 105,   // machine, addresses, port: where the children can come
  kNewParent = 106,  // i32 index, host, machine, addresses, port
  kMove = 107,       // -: to the new parent

  // along the tree, either way
  kKeyRequest = 112,  // id, KvRequest
  kKeyReply = 113,    // id, KvReply
  kKeyCancel = 114,   // id
  kKeyMoved = 116,    // id: the owner is leaving, ask again
  kBeat = 115,
  kStay = 117,  // -: children stay where they are
};

enum OpKind : uint8_t { kGather = 1, kBroadcast = 2, kAgree = 3 };
enum ProbeKind : uint8_t { kProbeOp = 1, kProbeKeys = 2, kProbeKeyList = 3 };

using Fields = std::map<std::string, std::string>;

inline void put(Writer& w, const Fields& fields) {
  w.u32(static_cast<uint32_t>(fields.size()));
  for (const auto& [key, value] : fields) w.str(key).str(value);
}

inline Fields get_fields(Reader& r) {
  Fields fields;
  uint32_t count = r.count(8);
  for (uint32_t i = 0; i < count; ++i) {
    std::string key = r.str();
    fields[key] = r.str();
  }
  return fields;
}

inline void put(Writer& w, const KvRequest& q) {
  w.u8(static_cast<uint8_t>(q.op)).str(q.key).str(q.value).str(q.expected).i64(q.amount);
}

inline KvRequest get_request(Reader& r) {
  KvRequest q;
  q.op = static_cast<KvOp>(r.u8());
  if (q.op < KvOp::kSet || q.op > KvOp::kQueueLen) throw BadFrame("an unknown key operation");
  q.key = r.str();
  q.value = r.str();
  q.expected = r.str();
  q.amount = r.i64();
  return q;
}

inline void put(Writer& w, const KvReply& p) {
  w.u8(p.found ? 1 : 0).i64(p.number).str(p.value).strs(p.keys);
}

inline KvReply get_reply(Reader& r) {
  KvReply p;
  p.found = r.u8() != 0;
  p.number = r.i64();
  p.value = r.str();
  p.keys = r.strs();
  return p;
}

}  // namespace commkit
