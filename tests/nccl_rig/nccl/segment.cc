#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <random>

namespace {

constexpr char kMagic[8] = {'N', 'C', 'C', 'L', 'R', 'I', 'G', '1'};
constexpr off_t kDataStart = off_t{1} << 32;
constexpr off_t kHalf = off_t{1} << 36;  // of a rank's data: meetings take turns
constexpr off_t kMailStart = off_t{1} << 48;
constexpr off_t kMailbox = off_t{1} << 36;  // of a pair of ranks
constexpr off_t kLocks = off_t{1} << 62;
constexpr size_t kPage = 4096;
constexpr size_t kWorthFreeing = 1 << 20;  // bytes
constexpr size_t kBuffered = 256 << 10;    // a smaller message does not wait for its receiver
constexpr long kGlance = 50'000'000;       // ns between looks at who is still there
constexpr int kMostRanks = 1024;

enum State : int32_t { kAbsent, kPresent, kDestroyed, kAborted };

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

void wake(std::atomic<uint32_t>* word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

bool all(bool writing, int fd, void* memory, size_t bytes, off_t at) {
  char* next = static_cast<char*>(memory);
  while (bytes > 0) {
    const ssize_t done = writing ? pwrite(fd, next, bytes, at) : pread(fd, next, bytes, at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    next += done;
    bytes -= static_cast<size_t>(done);
    at += done;
  }
  return true;
}

off_t window(int rank, uint64_t number) {
  return kDataStart + (off_t{rank} * 2 + static_cast<off_t>(number & 1)) * kHalf;
}

void give_back(int fd, off_t at, size_t bytes) {
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, static_cast<off_t>(bytes));
}

}  // namespace

struct Segment::Header {
  char magic[8];
  uint64_t nonce;
  std::atomic<int32_t> size;
  std::atomic<uint32_t> joined;
  std::atomic<uint32_t> come[kLanes];  // to meetings, all ranks together
  std::atomic<int32_t> poisoned;       // 1: being written, 2: reason is there
  char reason[400];
};

struct Segment::Slot {
  std::atomic<int32_t> state;
  std::atomic<uint64_t> come[kLanes];
  Intent intents[kLanes][2];
  char device[128];
};

// From one rank to another.
struct Segment::Mail {
  std::atomic<uint32_t> sent, taken;
  std::atomic<uint64_t> from, to;  // where the next is written and read
};

Result Segment::create(UniqueId* id) {
  static std::random_device* random = new std::random_device;
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "nccl-rig", 1U /* close-on-exec */));
  if (fd < 0) return fail(kSystemError, std::string("memfd_create: ") + std::strerror(errno));
  std::memset(static_cast<void*>(id), 0, sizeof *id);
  std::memcpy(id->magic, kMagic, sizeof kMagic);
  id->pid = getpid();
  id->fd = fd;
  id->nonce = uint64_t{(*random)()} << 32 | (*random)();
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.nonce = id->nonce;
  if (!all(true, fd, &header, sizeof header, 0)) return fail(kSystemError, "pwrite to a memfd");
  return kSuccess;
}

Segment::~Segment() { close(); }

void Segment::close() {
  std::lock_guard<std::mutex> guard(closing_);
  if (header_ != nullptr) munmap(header_, mapped_);
  header_ = nullptr;
  if (fd_ >= 0 && owned_) ::close(fd_);
  fd_ = -1;
}

Segment::Slot& Segment::slot(int rank) const {
  return reinterpret_cast<Slot*>(reinterpret_cast<char*>(header_) + kPage)[rank];
}

Segment::Mail& Segment::mail(int from, int to) const {
  return reinterpret_cast<Mail*>(&slot(size_))[from * size_ + to];
}

Result Segment::open(const UniqueId& id) {
  if (std::memcmp(id.magic, kMagic, sizeof kMagic) != 0)
    return fail(kInvalidArgument, "the id does not come from ncclGetUniqueId of this library");
  // The maker goes on with the descriptor it has: closing any of a process ends all its locks.
  const std::string path = "/proc/" + std::to_string(id.pid) + "/fd/" + std::to_string(id.fd);
  owned_ = id.pid != getpid();
  fd_ = owned_ ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : id.fd;
  Header header{};
  if (fd_ < 0 || !all(false, fd_, &header, sizeof header, 0) || header.nonce != id.nonce ||
      std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) {
    return fail(kRemoteError, "process " + std::to_string(id.pid) +
                                  ", which made the id, has ended or left the communicator");
  }
  mapped_ = kPage + sizeof(Slot) * static_cast<size_t>(size_) +
            sizeof(Mail) * static_cast<size_t>(size_) * static_cast<size_t>(size_);
  mapped_ = (mapped_ + kPage - 1) / kPage * kPage;
  return kSuccess;
}

Result Segment::poison(const std::string& reason) {
  int32_t clean = 0;
  if (header_->poisoned.compare_exchange_strong(clean, 1)) {
    std::snprintf(header_->reason, sizeof header_->reason, "%s", reason.c_str());
    header_->poisoned = 2;
  }
  wake(&header_->joined);
  return fail(kInvalidUsage, why_ = reason);
}

bool Segment::lost(int rank) {
  Slot& its = slot(rank);
  if (rank == rank_) return false;
  if (its.state == kAborted) {
    why_ = "rank " + std::to_string(rank) + " has aborted this communicator";
    return true;
  }
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kLocks + rank;
  lock.l_len = 1;
  if (its.state != kPresent || fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK)
    return false;
  if (its.state != kPresent) return false;  // it left between the two looks
  why_ = "the process of rank " + std::to_string(rank) + " has ended";
  return true;
}

template <class Arrived, class Missing>
Result Segment::wait(std::atomic<uint32_t>& word, Arrived arrived, Missing missing,
                     const std::atomic<bool>* also) {
  for (;;) {
    const uint32_t seen = word;
    if (arrived(seen)) return kSuccess;
    if (stopped_ || (also != nullptr && *also)) return fail(kInternalError, why_ = "aborted");
    const timespec limit{0, kGlance};
    futex(&word, FUTEX_WAIT, seen, &limit);
    if (word != seen) continue;
    for (int rank = 0; rank < size_; rank++) {
      if (missing(rank) && lost(rank) && !arrived(word)) return fail(kRemoteError, why_);
    }
  }
}

Result Segment::attach(const UniqueId& id, int rank, int size, const std::string& device) {
  if (size > kMostRanks) return fail(kInvalidArgument, "the rig has room for 1024 ranks");
  rank_ = rank;
  size_ = size;
  if (const Result result = open(id); result != kSuccess) return result;
  struct stat status{};
  if (fstat(fd_, &status) != 0 ||
      (status.st_size < static_cast<off_t>(mapped_) && ftruncate(fd_, kDataStart) != 0))
    return fail(kSystemError, std::string("ftruncate: ") + std::strerror(errno));
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) return fail(kSystemError, std::string("mmap: ") + std::strerror(errno));
  {
    std::lock_guard<std::mutex> guard(closing_);
    header_ = static_cast<Header*>(memory);
  }

  int32_t agreed = 0;
  const std::string who = "rank " + std::to_string(rank);
  if (!header_->size.compare_exchange_strong(agreed, size) && agreed != size)
    return poison(who + " says that there are " + std::to_string(size) + " ranks, others say " +
                  std::to_string(agreed));
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kLocks + rank;
  lock.l_len = 1;
  int32_t absent = kAbsent;
  if (fcntl(fd_, F_SETLK, &lock) != 0 ||
      !slot(rank).state.compare_exchange_strong(absent, kPresent))
    return poison(who + " of " + std::to_string(size) + " has come twice");
  owned_ = true;
  std::snprintf(slot(rank).device, sizeof slot(rank).device, "%s", device.c_str());
  header_->joined++;
  wake(&header_->joined);
  const auto complete = [&](uint32_t joined) {
    return header_->poisoned != 0 || joined == static_cast<uint32_t>(size_);
  };
  const auto everyone = [](int) { return true; };
  if (const Result result = wait(header_->joined, complete, everyone, nullptr); result != kSuccess)
    return result;
  while (header_->poisoned == 1) usleep(1000);
  if (header_->poisoned != 0) return fail(kInvalidUsage, why_ = header_->reason);
  for (int other = 0; other < size; other++) {
    if (other == rank || device != slot(other).device) continue;
    return fail(kInvalidUsage, why_ = "Duplicate GPU detected: rank " + std::to_string(rank) +
                                      " and rank " + std::to_string(other) + " both on " + device);
  }
  return kSuccess;
}

void Segment::leave(bool orderly) {
  if (header_ == nullptr || slot(rank_).state != kPresent) return;
  slot(rank_).state = orderly ? kDestroyed : kAborted;
}

void Segment::stop() {
  stopped_ = true;
  std::lock_guard<std::mutex> guard(closing_);
  if (header_ == nullptr) return;
  wake(&header_->joined);
  for (auto& word : header_->come) wake(&word);
  for (int peer = 0; peer < size_; peer++) {
    wake(&mail(peer, rank_).sent);
    wake(&mail(rank_, peer).taken);
  }
}

// Nobody comes to a meeting before all have come to the one before, so two of everything do.
Result Segment::meet(Lane lane, uint64_t number, const Intent& mine,
                     const std::atomic<bool>* also) {
  Slot& own = slot(rank_);
  own.intents[lane][number & 1] = mine;
  own.come[lane] = number;
  const auto target = static_cast<uint32_t>(number * static_cast<uint64_t>(size_));
  const auto arrived = [target](uint32_t come) { return static_cast<int32_t>(come - target) >= 0; };
  if (arrived(++header_->come[lane])) wake(&header_->come[lane]);
  const auto missing = [&](int rank) { return slot(rank).come[lane] < number; };
  return wait(header_->come[lane], arrived, missing, also);
}

const Intent& Segment::intent(Lane lane, uint64_t number, int rank) const {
  return slot(rank).intents[lane][number & 1];
}

bool Segment::write(uint64_t number, const void* from, size_t bytes) {
  const off_t at = window(rank_, number);
  size_t& before = written_[number & 1];
  if (before > kWorthFreeing) give_back(fd_, at, before);
  before = bytes;
  return all(true, fd_, const_cast<void*>(from), bytes, at);
}

bool Segment::read(uint64_t number, int rank, size_t offset, size_t bytes, void* to) const {
  return all(false, fd_, to, bytes, window(rank, number) + static_cast<off_t>(offset));
}

namespace {

off_t mailbox(int from, int to, int size, uint64_t offset) {
  return kMailStart + (off_t{from} * size + to) * kMailbox + static_cast<off_t>(offset);
}

uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Result Segment::post(int peer, const void* from, size_t bytes, uint32_t* number) {
  Mail& box = mail(rank_, peer);
  const uint64_t start = box.from, length = bytes;
  const off_t at = mailbox(rank_, peer, size_, start);
  if (!all(true, fd_, const_cast<uint64_t*>(&length), sizeof length, at) ||
      !all(true, fd_, const_cast<void*>(from), bytes, at + static_cast<off_t>(sizeof length)))
    return fail(kSystemError, std::string("pwrite: ") + std::strerror(errno));
  box.from = start + whole_pages(bytes + sizeof length);
  *number = bytes > kBuffered ? box.sent + 1 : 0;
  box.sent++;
  wake(&box.sent);
  return kSuccess;
}

Result Segment::taken(int peer, uint32_t number) {
  if (number == 0) return kSuccess;
  const auto arrived = [number](uint32_t taken) {
    return static_cast<int32_t>(taken - number) >= 0;
  };
  return wait(mail(rank_, peer).taken, arrived, [peer](int rank) { return rank == peer; }, nullptr);
}

Result Segment::take(int peer, void* to, size_t bytes) {
  Mail& box = mail(peer, rank_);
  const uint32_t before = box.taken;
  const auto arrived = [before](uint32_t sent) { return sent != before; };
  const auto missing = [peer](int rank) { return rank == peer; };
  if (const Result result = wait(box.sent, arrived, missing, nullptr); result != kSuccess)
    return result;
  const uint64_t start = box.to;
  const off_t at = mailbox(peer, rank_, size_, start);
  uint64_t length = 0;
  if (!all(false, fd_, &length, sizeof length, at)) return fail(kSystemError, "pread: failed");
  const uint64_t pages = whole_pages(length + sizeof length);
  if (length != bytes)
    return fail(kInvalidUsage, why_ = "rank " + std::to_string(peer) + " sent " +
                                      std::to_string(length) + " bytes to rank " +
                                      std::to_string(rank_) + ", which expected " +
                                      std::to_string(bytes));
  if (!all(false, fd_, to, bytes, at + static_cast<off_t>(sizeof length)))
    return fail(kSystemError, "pread: failed");
  give_back(fd_, at, pages);
  box.to = start + pages;
  box.taken++;
  wake(&box.taken);
  return kSuccess;
}
