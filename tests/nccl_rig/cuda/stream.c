/* Streams: queues whose work is done one after the other, each by a thread of its own.  The thread
 * is started with the first work that cannot be done at once.  Streams order themselves by events
 * only; the implicit order between CUDA's default stream and blocking streams does not exist. */
#include <pthread.h>
#include <stdlib.h>

#include "runtime.h"

struct work {
  work_function function;
  void* argument;
  struct work* next;
};

struct stream {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct work *first, **end;
  uint64_t given, finished;
  bool busy, has_thread, destroyed;
  int device, priority;
  unsigned flags;
  struct stream* next; /* in g_streams; a destroyed stream stays there */
};

static struct stream* g_streams;
static struct stream* g_default[MAX_DEVICES];
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;

static struct stream* make(int device, unsigned flags, int priority) {
  struct stream* stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  stream->end = &stream->first;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  stream->next = g_streams;
  g_streams = stream;
  return stream;
}

/* The handles 0, 1 and 2 are CUDA's default streams: one and the same here. */
static struct stream* real(cudaStream_t stream) {
  if ((uintptr_t)stream > 2) return stream;
  int device = current_device();
  pthread_mutex_lock(&g_lock);
  if (!g_default[device]) g_default[device] = make(device, 0, 0);
  pthread_mutex_unlock(&g_lock);
  return g_default[device];
}

static void* serve(void* argument) {
  struct stream* stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (stream->busy || (!stream->first && !stream->destroyed))
      pthread_cond_wait(&stream->changed, &stream->lock);
    struct work* work = stream->first;
    if (!work) break;
    stream->first = work->next;
    if (!stream->first) stream->end = &stream->first;
    stream->busy = true;
    pthread_mutex_unlock(&stream->lock);
    work->function(work->argument);
    free(work);
    pthread_mutex_lock(&stream->lock);
    stream->busy = false;
    stream->finished++;
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

uint64_t stream_push(cudaStream_t handle, bool quick, work_function function, void* argument) {
  struct stream* stream = real(handle);
  pthread_mutex_lock(&stream->lock);
  uint64_t number = ++stream->given;
  if (quick && !stream->first && !stream->busy) {
    stream->busy = true;
    pthread_mutex_unlock(&stream->lock);
    function(argument);
    pthread_mutex_lock(&stream->lock);
    stream->busy = false;
    stream->finished++;
  } else {
    struct work* work = malloc(sizeof *work);
    *work = (struct work){function, argument, NULL};
    *stream->end = work;
    stream->end = &work->next;
    if (!stream->has_thread) {
      pthread_t thread;
      pthread_attr_t attributes;
      pthread_attr_init(&attributes);
      pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
      pthread_attr_setstacksize(&attributes, 512 << 10);
      if (pthread_create(&thread, &attributes, serve, stream)) abort();
      pthread_attr_destroy(&attributes);
      stream->has_thread = true;
    }
  }
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  return number;
}

bool stream_is_idle(cudaStream_t handle) {
  struct stream* stream = real(handle);
  pthread_mutex_lock(&stream->lock);
  bool idle = stream->finished == stream->given;
  pthread_mutex_unlock(&stream->lock);
  return idle;
}

void stream_wait(cudaStream_t handle, uint64_t number) {
  struct stream* stream = real(handle);
  pthread_mutex_lock(&stream->lock);
  while (stream->finished < number) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
}

static void finish(struct stream* stream) {
  pthread_mutex_lock(&stream->lock);
  uint64_t given = stream->given;
  while (stream->finished < given) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
}

void streams_finish(int device) {
  pthread_mutex_lock(&g_lock);
  struct stream* stream = g_streams;
  pthread_mutex_unlock(&g_lock);
  for (; stream; stream = stream->next)
    if (device < 0 || stream->device == device) finish(stream);
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (!device_count()) return failed(kNoDevice);
  int device = current_device();
  pthread_mutex_lock(&g_lock);
  *stream = make(device, flags, priority);
  pthread_mutex_unlock(&g_lock);
  return kSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if ((uintptr_t)stream <= 2) return failed(kInvalidResourceHandle);
  pthread_mutex_lock(&stream->lock);
  stream->destroyed = true; /* its thread does what has been given, then ends */
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  return kSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_is_idle(stream) ? kSuccess : failed(kNotReady);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  finish(real(stream));
  return kSuccess;
}

API cudaError_t cudaDeviceSynchronize(void) {
  streams_finish(current_device());
  return kSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = real(stream)->priority;
  return kSuccess;
}

/* The argument is the host function's own; CUDA allows no call of its API in there. */
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, work_function function, void* argument) {
  stream_push(stream, false, function, argument);
  return kSuccess;
}

struct callback {
  void (*function)(cudaStream_t, cudaError_t, void*);
  cudaStream_t stream;
  void* argument;
};

static void call_back(void* argument) {
  struct callback* callback = argument;
  callback->function(callback->stream, kSuccess, callback->argument);
  free(callback);
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                      void (*function)(cudaStream_t, cudaError_t, void*),
                                      void* argument, unsigned flags) {
  (void)flags;
  struct callback* callback = malloc(sizeof *callback);
  *callback = (struct callback){function, stream, argument};
  stream_push(stream, false, call_back, callback);
  return kSuccess;
}

/* Graphs do not exist, so no stream is ever being captured. */
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int* status) {
  (void)stream;
  *status = 0;
  return kSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int* status, unsigned long long* id,
                                         void** graph, const void*** dependencies,
                                         const void** edges, size_t* count) {
  (void)stream, (void)dependencies, (void)edges;
  *status = 0;
  if (id) *id = 0;
  if (graph) *graph = NULL;
  if (count) *count = 0;
  return kSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(int* mode) {
  (void)mode;
  return kSuccess;
}
