// What the ranks of one communicator share: anonymous memory that all of them map.
//
// Its first part holds counters and what each rank is about to do; the rest, sparse, the data of
// operations.  Whoever makes an id makes the memory; the others open it through /proc, so nothing
// is left behind whatever ends them.  A rank keeps a lock on a byte of its own, which the kernel
// gives up when the process ends: that is how the others see a death.
#ifndef NCCL_RIG_NCCL_SEGMENT_H_
#define NCCL_RIG_NCCL_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "types.h"

// What a rank brings to a meeting.
struct Intent {
  int call, datatype, reduction, root;
  uint64_t count;
  double scale;
  UniqueId id;
};

// Meetings of one lane have numbers from 1 on, and every rank comes to all of them in order.
// Collectives run in streams' threads, what makes communicators in others: each has its lane.
enum Lane : int { kData, kControl, kLanes };

class Segment {
 public:
  // A new, empty one, and the id by which others find it while this process lives.
  static Result create(UniqueId* id);

  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  // Takes the rank's place and returns when all `size` ranks have; `device` names host and GPU, two
  // ranks with one are refused as NCCL does.  All ranks hear of a mismatch.
  Result attach(const UniqueId& id, int rank, int size, const std::string& device);
  // No wait goes on, here or elsewhere, for a rank that has aborted; `orderly`: it has destroyed.
  void leave(bool orderly);
  // Gives the data back; nothing but stop() and leave() may follow.
  void close();
  // Ends this rank's waits.
  void stop();
  bool stopped() const { return stopped_; }

  // Says what this rank intends, and returns when every rank has come to this meeting.
  // kRemoteError: one of them will not come; kInternalError: stopped, or *also became true.
  Result meet(Lane lane, uint64_t number, const Intent& mine,
              const std::atomic<bool>* also = nullptr);
  const Intent& intent(Lane lane, uint64_t number, int rank) const;

  // Data of a meeting: written before it, read after it, until the meeting after the next.
  bool write(uint64_t number, const void* from, size_t bytes);
  bool read(uint64_t number, int rank, size_t offset, size_t bytes, void* to) const;

  // Messages from one rank to another, in order.
  Result post(int peer, const void* from, size_t bytes, uint32_t* number);
  Result taken(int peer, uint32_t number);  // returns when the peer has taken that message
  Result take(int peer, void* to, size_t bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Why something failed, in words.
  std::string why() const { return why_; }

 private:
  struct Header;
  struct Slot;
  struct Mail;

  Slot& slot(int rank) const;
  Mail& mail(int from, int to) const;
  Result open(const UniqueId& id);
  Result poison(const std::string& reason);
  bool lost(int rank);
  template <class Arrived, class Missing>
  Result wait(std::atomic<uint32_t>& word, Arrived arrived, Missing missing,
              const std::atomic<bool>* also);

  int fd_ = -1, rank_ = -1, size_ = 0;
  Header* header_ = nullptr;
  bool owned_ = false;  // the descriptor
  size_t mapped_ = 0;
  size_t written_[2] = {0, 0};
  std::atomic<bool> stopped_{false};
  std::mutex closing_;
  std::string why_;
};

#endif  // NCCL_RIG_NCCL_SEGMENT_H_
