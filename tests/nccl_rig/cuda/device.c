/* Devices, errors, and the few answers about kernels that torch asks for before it launches one. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

/* Attributes by their number in CUDA's documentation; all others are 0. */
static const struct {
  int attribute, value;
} kAttributes[] = {
    {1, 1024},  {2, 1024},      {3, 1024},   {4, 64},      {5, 2147483647}, {6, 65535},
    {7, 65535}, {8, 49152},     {10, 32},    {12, 65536},  {16, 132},       {19, 1},
    {31, 1},    {38, 52428800}, {39, 2048},  {41, 1},      {75, 9},         {76, 0},
    {78, 1},    {81, 233472},   {82, 65536}, {97, 232448}, {106, 32},
};

static int g_count;
static __thread int t_device;
static __thread cudaError_t t_error;

/* NCCL_RIG_DEVICES devices; CUDA_VISIBLE_DEVICES counts where it lists numbers. */
__attribute__((constructor)) static void configure(void) {
  const char *devices = getenv("NCCL_RIG_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  g_count = devices && *devices ? atoi(devices) : 8;
  if (g_count < 0 || g_count > MAX_DEVICES) g_count = MAX_DEVICES;
  if (!visible) return;
  int listed = 0;
  for (char* end; *visible; visible = *end == ',' ? end + 1 : end) {
    long device = strtol(visible, &end, 10);
    if (end == visible || device < 0 || device >= g_count) break;
    listed++;
  }
  g_count = listed;
}

int device_count(void) { return g_count; }
int current_device(void) { return t_device; }

cudaError_t failed(cudaError_t error) {
  if (error) t_error = error;
  return error;
}

API cudaError_t cudaGetLastError(void) {
  cudaError_t error = t_error;
  t_error = kSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError(void) { return t_error; }

API const char* cudaGetErrorName(cudaError_t error) {
  switch ((int)error) {
    case kSuccess:
      return "cudaSuccess";
    case kInvalidValue:
      return "cudaErrorInvalidValue";
    case kMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case kNoDevice:
      return "cudaErrorNoDevice";
    case kInvalidDevice:
      return "cudaErrorInvalidDevice";
    case kInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case kNotReady:
      return "cudaErrorNotReady";
    case kNotSupported:
      return "cudaErrorNotSupported";
  }
  return "unrecognized error code";
}

API const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = g_count;
  return g_count ? kSuccess : failed(kNoDevice);
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= g_count) return failed(kInvalidDevice);
  t_device = device;
  return kSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return g_count ? kSuccess : failed(kNoDevice);
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device >= g_count) return failed(kInvalidDevice);
  *value = 0;
  for (size_t i = 0; i < sizeof kAttributes / sizeof *kAttributes; i++)
    if (kAttributes[i].attribute == attribute) *value = kAttributes[i].value;
  if (attribute == 33) *value = 0x10 + device; /* the PCI bus */
  return kSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (device < 0 || device >= g_count) return failed(kInvalidDevice);
  snprintf(text, (size_t)size, "0000:%02x:00.0", 0x10 + device);
  return kSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return kSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)peer, (void)flags;
  return kSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kSuccess;
}

/* cudaDeviceProp of CUDA 13: what torch shows or computes with; the rest stays 0. */
struct cudaDeviceProp {
  char name[256], uuid[16], luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
  int multiProcessorCount, integrated, canMapHostMemory;
  int textures[41], concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID;
  int tccDriver, asyncEngineCount, unifiedAddressing, memoryBusWidth, l2CacheSize;
  int persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported;
  int globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, others[6], cooperativeLaunch;
  size_t sharedMemPerBlockOptin;
  int more[2], maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  char rest[304];
};
_Static_assert(sizeof(struct cudaDeviceProp) == 1008, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(struct cudaDeviceProp, multiProcessorCount) == 384, "cudaDeviceProp");
_Static_assert(offsetof(struct cudaDeviceProp, concurrentKernels) == 560, "cudaDeviceProp");
_Static_assert(offsetof(struct cudaDeviceProp, sharedMemPerMultiprocessor) == 624,
               "cudaDeviceProp");
_Static_assert(offsetof(struct cudaDeviceProp, cooperativeLaunch) == 668, "cudaDeviceProp");
_Static_assert(offsetof(struct cudaDeviceProp, reservedSharedMemPerBlock) == 696, "cudaDeviceProp");

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= g_count) return failed(kInvalidDevice);
  struct cudaDeviceProp made = {
      .name = "stand-in device of the NCCL rig",
      .totalGlobalMem = (size_t)80 << 30,
      .sharedMemPerBlock = 49152,
      .regsPerBlock = 65536,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .totalConstMem = 65536,
      .major = 9,
      .multiProcessorCount = 132,
      .canMapHostMemory = 1,
      .concurrentKernels = 1,
      .pciBusID = 0x10 + device,
      .unifiedAddressing = 1,
      .l2CacheSize = 52428800,
      .maxThreadsPerMultiProcessor = 2048,
      .sharedMemPerMultiprocessor = 233472,
      .regsPerMultiprocessor = 65536,
      .sharedMemPerBlockOptin = 232448,
      .maxBlocksPerMultiProcessor = 32,
  };
  memcpy(made.uuid, "NCCL rig device", 15);
  made.uuid[15] = (char)device;
  *properties = made;
  return kSuccess;
}

/* --- Kernels do nothing --- */

struct dim3 {
  unsigned x, y, z;
};

API cudaError_t cudaLaunchKernel(const void* function, struct dim3 grid, struct dim3 block,
                                 void** arguments, size_t shared, cudaStream_t stream) {
  (void)function, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
  return kSuccess;
}

API cudaError_t cudaLaunchKernelExC(const void* config, const void* function, void** arguments) {
  (void)config, (void)function, (void)arguments;
  return kSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return kSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* function, int block_size, size_t shared, unsigned flags) {
  (void)function, (void)block_size, (void)shared, (void)flags;
  *blocks = 2;
  return kSuccess;
}

/* --- The driver's functions, by name --- */

static int unsupported(void) { return kNotSupported; }

/* Every device counts as in use: torch asks before it makes a context. */
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = device >= 0 && device < g_count;
  return kSuccess;
}

/* torch refuses to start where a function it may need later does not exist. */
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                 unsigned version, unsigned long long flags,
                                                 int* status) {
  (void)version, (void)flags;
  *function = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void*)cuDevicePrimaryCtxGetState
                                                          : (void*)unsupported;
  if (status) *status = 0;
  return kSuccess;
}
