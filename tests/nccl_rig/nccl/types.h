// NCCL's own numbers, from its documentation, and what the files of the mock share.
#ifndef NCCL_RIG_NCCL_TYPES_H_
#define NCCL_RIG_NCCL_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

enum Result : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8e4m3,
  kFloat8e5m2,
  kDataTypes,
};

enum Reduction : int { kSum, kProd, kMax, kMin, kAvg, kReductions };

// ncclUniqueId: where the segment of a communicator is found.
struct UniqueId {
  char magic[8];
  int32_t pid, fd;
  uint64_t nonce;
  char unused[104];
};
static_assert(sizeof(UniqueId) == 128, "ncclUniqueId is 128 bytes");

// The documented head of ncclConfig_t; what follows does not concern the mock.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
constexpr unsigned kConfigMagic = 0xcafebeef;

size_t size_of(int datatype);

// Keeps `text` for ncclGetLastError of this thread; returns `result`.
Result fail(Result result, const std::string& text);

// To standard error with NCCL_RIG_LOG=1.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A number in the environment; `otherwise` where there is none.
int number_of(const char* variable, int otherwise);

#endif  // NCCL_RIG_NCCL_TYPES_H_
