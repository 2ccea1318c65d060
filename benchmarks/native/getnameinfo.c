/* Preloaded under torch's TCPStore, which looks every peer's name up in reverse.  Without DELAY_US
   the look-up is numeric, so that no name server is in the numbers; with it, it takes that long. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*lookup)(const struct sockaddr*, socklen_t, char*, socklen_t, char*, socklen_t, int);

int getnameinfo(const struct sockaddr* address, socklen_t length, char* host, socklen_t host_length,
                char* service, socklen_t service_length, int flags) {
  static lookup real;
  if (real == 0) real = (lookup)dlsym(RTLD_NEXT, "getnameinfo");
  const char* delay = getenv("DELAY_US");
  if (delay != 0) usleep((useconds_t)atoi(delay));
  return real(address, length, host, host_length, service, service_length, flags | NI_NUMERICHOST);
}
