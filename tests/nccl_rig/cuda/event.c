/* Events: a count of how often the event was recorded, and how far its streams have come. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "runtime.h"

enum { kDisableTiming = 2 };

struct event {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t recorded, reached;
  struct timespec time;
  unsigned flags;
  int references; /* the handle, and work in streams */
};
typedef struct event* cudaEvent_t;

struct mark {
  struct event* event;
  uint64_t number;
};

/* With the lock held; gives it up. */
static void drop(struct event* event) {
  bool last = --event->references == 0;
  pthread_mutex_unlock(&event->lock);
  if (!last) return;
  pthread_cond_destroy(&event->changed);
  pthread_mutex_destroy(&event->lock);
  free(event);
}

static struct mark* mark_of(struct event* event, uint64_t number) {
  struct mark* mark = malloc(sizeof *mark);
  *mark = (struct mark){event, number};
  event->references++;
  return mark;
}

static void reach(void* argument) {
  struct mark mark = *(struct mark*)argument;
  free(argument);
  pthread_mutex_lock(&mark.event->lock);
  if (mark.number > mark.event->reached) {
    mark.event->reached = mark.number;
    clock_gettime(CLOCK_MONOTONIC, &mark.event->time);
  }
  pthread_cond_broadcast(&mark.event->changed);
  drop(mark.event);
}

static void await(void* argument) {
  struct mark mark = *(struct mark*)argument;
  free(argument);
  pthread_mutex_lock(&mark.event->lock);
  while (mark.event->reached < mark.number)
    pthread_cond_wait(&mark.event->changed, &mark.event->lock);
  drop(mark.event);
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (!device_count()) return failed(kNoDevice);
  *event = calloc(1, sizeof **event);
  pthread_mutex_init(&(*event)->lock, NULL);
  pthread_cond_init(&(*event)->changed, NULL);
  (*event)->flags = flags;
  (*event)->references = 1;
  return kSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!event) return failed(kInvalidResourceHandle);
  pthread_mutex_lock(&event->lock);
  drop(event);
  return kSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  pthread_mutex_lock(&event->lock);
  struct mark* mark = mark_of(event, ++event->recorded);
  pthread_mutex_unlock(&event->lock);
  stream_push(stream, true, reach, mark);
  return kSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  (void)flags;
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  pthread_mutex_lock(&event->lock);
  bool reached = event->reached >= event->recorded;
  struct mark* mark = reached ? NULL : mark_of(event, event->recorded);
  pthread_mutex_unlock(&event->lock);
  if (mark) stream_push(stream, false, await, mark);
  return kSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  pthread_mutex_lock(&event->lock);
  bool reached = event->reached >= event->recorded;
  pthread_mutex_unlock(&event->lock);
  return reached ? kSuccess : failed(kNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  pthread_mutex_lock(&event->lock);
  uint64_t number = event->recorded;
  event->references++;
  while (event->reached < number) pthread_cond_wait(&event->changed, &event->lock);
  drop(event);
  return kSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->recorded || !end->recorded || ((start->flags | end->flags) & kDisableTiming))
    return failed(kInvalidResourceHandle);
  if (cudaEventQuery(start) || cudaEventQuery(end)) return failed(kNotReady);
  *milliseconds = (float)((end->time.tv_sec - start->time.tv_sec) * 1e3 +
                          (end->time.tv_nsec - start->time.tv_nsec) * 1e-6);
  return kSuccess;
}
