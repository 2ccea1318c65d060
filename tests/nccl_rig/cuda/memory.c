/* Memory: a device's memory is the host's.  Untouched pages cost nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

#define PAGE 4096ul
#define DEVICE_BYTES ((size_t)80 << 30)

enum kind { kUnregistered = 0, kHost = 1, kDevice = 2 }; /* cudaMemoryType */

struct range {
  uintptr_t start;
  size_t size;
  enum kind kind;
  bool ours; /* mapped here, as opposed to registered */
  int device;
};

/* All that is allocated or registered, by address. */
static struct range* g_ranges;
static size_t g_count, g_room;
static size_t g_used[MAX_DEVICES];
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;

/* Index of the first range that starts behind the address; with the lock held. */
static size_t behind(uintptr_t address) {
  size_t low = 0, high = g_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (g_ranges[middle].start <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static void add(struct range range) {
  pthread_mutex_lock(&g_lock);
  if (g_count == g_room) {
    g_room = g_room ? 2 * g_room : 256;
    g_ranges = realloc(g_ranges, g_room * sizeof *g_ranges);
    if (!g_ranges) abort();
  }
  size_t at = behind(range.start);
  memmove(g_ranges + at + 1, g_ranges + at, (g_count - at) * sizeof *g_ranges);
  g_ranges[at] = range;
  g_count++;
  if (range.kind == kDevice) g_used[range.device] += range.size;
  pthread_mutex_unlock(&g_lock);
}

static bool find(const void* address, struct range* found) {
  pthread_mutex_lock(&g_lock);
  size_t at = behind((uintptr_t)address);
  bool inside = at && (uintptr_t)address < g_ranges[at - 1].start + g_ranges[at - 1].size;
  if (inside) *found = g_ranges[at - 1];
  pthread_mutex_unlock(&g_lock);
  return inside;
}

static bool take(const void* address, struct range* found) {
  pthread_mutex_lock(&g_lock);
  size_t at = behind((uintptr_t)address);
  bool starts = at && g_ranges[at - 1].start == (uintptr_t)address;
  if (starts) {
    *found = g_ranges[at - 1];
    memmove(g_ranges + at - 1, g_ranges + at, (g_count - at) * sizeof *g_ranges);
    g_count--;
    if (found->kind == kDevice) g_used[found->device] -= found->size;
  }
  pthread_mutex_unlock(&g_lock);
  return starts;
}

bool is_known(const void* address) {
  struct range range;
  return find(address, &range);
}

static size_t whole_pages(size_t size) { return ((size ? size : 1) + PAGE - 1) & ~(PAGE - 1); }

static cudaError_t allocate(void** address, size_t size, enum kind kind) {
  *address = NULL;
  if (!device_count()) return failed(kNoDevice);
  if (!size) return kSuccess;
  int device = current_device();
  if (kind == kDevice && g_used[device] + size > DEVICE_BYTES) return failed(kMemoryAllocation);
  void* memory = mmap(NULL, whole_pages(size), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return failed(kMemoryAllocation);
  add((struct range){(uintptr_t)memory, size, kind, true, device});
  *address = memory;
  return kSuccess;
}

static cudaError_t release(void* address) {
  struct range range;
  if (!address) return kSuccess;
  streams_finish(-1); /* as CUDA does: work in flight may still use it */
  if (!take(address, &range) || !range.ours) return failed(kInvalidValue);
  munmap(address, whole_pages(range.size));
  return kSuccess;
}

API cudaError_t cudaMalloc(void** address, size_t size) { return allocate(address, size, kDevice); }

API cudaError_t cudaFree(void* address) { return release(address); }

API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned flags) {
  (void)flags;
  return allocate(address, size, kHost);
}

API cudaError_t cudaMallocHost(void** address, size_t size) {
  return allocate(address, size, kHost);
}

API cudaError_t cudaFreeHost(void* address) { return release(address); }

API cudaError_t cudaHostRegister(void* address, size_t size, unsigned flags) {
  (void)flags;
  add((struct range){(uintptr_t)address, size, kHost, false, current_device()});
  return kSuccess;
}

API cudaError_t cudaHostUnregister(void* address) {
  struct range range;
  return take(address, &range) ? kSuccess : failed(kInvalidValue);
}

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  if (!device_count()) return failed(kNoDevice);
  *total = DEVICE_BYTES;
  *available = DEVICE_BYTES - g_used[current_device()];
  return kSuccess;
}

struct cudaPointerAttributes {
  int type, device;
  void *devicePointer, *hostPointer;
  long reserved[8];
};

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes,
                                         const void* address) {
  struct range range = {0, 0, kUnregistered, false, -2};
  memset(attributes, 0, sizeof *attributes);
  find(address, &range);
  attributes->type = range.kind;
  attributes->device = range.device;
  attributes->devicePointer = range.kind == kUnregistered ? NULL : (void*)address;
  attributes->hostPointer = range.kind == kDevice ? NULL : (void*)address;
  return kSuccess;
}

/* --- Copies --- */

struct copy {
  void* to;
  const void* from;
  size_t size;
  void* owned; /* a copy of pageable memory, made when the call was made */
};

static void run_copy(void* argument) {
  struct copy* copy = argument;
  memmove(copy->to, copy->from, copy->size);
  free(copy->owned);
  free(copy);
}

/* Pageable memory is read before the call returns, and written before it returns. */
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, int kind,
                                cudaStream_t stream) {
  (void)kind;
  if (!device_count()) return failed(kNoDevice);
  if (!size) return kSuccess;
  struct copy* copy = malloc(sizeof *copy);
  *copy = (struct copy){to, from, size, NULL};
  if (!is_known(from) && !stream_is_idle(stream)) {
    copy->from = copy->owned = malloc(size);
    memcpy(copy->owned, from, size);
  }
  uint64_t number = stream_push(stream, true, run_copy, copy);
  if (!is_known(to)) stream_wait(stream, number);
  return kSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
  if (!error) stream_wait(NULL, stream_push(NULL, true, free, NULL));
  return error;
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                    size_t size, cudaStream_t stream) {
  (void)to_device, (void)from_device;
  return cudaMemcpyAsync(to, from, size, 0, stream);
}

struct fill {
  void* to;
  int value;
  size_t size;
};

static void run_fill(void* argument) {
  struct fill* fill = argument;
  memset(fill->to, fill->value, fill->size);
  free(fill);
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  if (!device_count()) return failed(kNoDevice);
  struct fill* fill = malloc(sizeof *fill);
  *fill = (struct fill){to, value, size};
  stream_push(stream, true, run_fill, fill);
  return kSuccess;
}

API cudaError_t cudaMemset(void* to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, NULL);
}
