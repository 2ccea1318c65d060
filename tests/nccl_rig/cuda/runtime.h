/* What the files of the stand-in CUDA runtime share.  Numbers are those of CUDA's documentation. */
#ifndef NCCL_RIG_CUDA_RUNTIME_H_
#define NCCL_RIG_CUDA_RUNTIME_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 32

typedef enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidResourceHandle = 400,
  kNotReady = 600,
  kNotSupported = 801,
} cudaError_t;

/* Remembers an error for cudaGetLastError. */
cudaError_t failed(cudaError_t error);

/* --- device.c --- */
int device_count(void);
int current_device(void);

/* --- memory.c --- */
/* Whether CUDA handed this memory out or pinned it: copies from and to it need no detour. */
bool is_known(const void* address);

/* --- stream.c --- */
struct stream;
typedef struct stream* cudaStream_t;
typedef void (*work_function)(void* argument);

/* Runs `work` behind everything that was given to the stream before.  At once, in the caller's
 * thread, where nothing is pending and the work is `quick`; in the stream's own thread otherwise.
 */
uint64_t stream_push(cudaStream_t stream, bool quick, work_function work, void* argument);
/* Whether everything given to the stream has been done. */
bool stream_is_idle(cudaStream_t stream);
/* Returns when the piece of work with that number, and all before it, have been done. */
void stream_wait(cudaStream_t stream, uint64_t number);
/* Returns when every stream of the device has done its work; device -1: of all devices. */
void streams_finish(int device);

#endif
