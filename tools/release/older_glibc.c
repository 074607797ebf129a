/* What GCC 12's static runtime and headers call of newer C libraries, so that the programs of a release run with glibc 2.28, which
   RHEL 8 and Debian 10 have. -Dstatic_runtime=true links it in. */
#define _GNU_SOURCE
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

/* glibc 2.32; shared_ptr counts without atomic operations where it is not 0. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

/* glibc 2.30; std::condition_variable waits by it for a time of steady_clock. Here the wall clock's time is waited for that is as
   far away: a clock that is set meanwhile ends the wait early or late, and callers look again at what they wait for. */
__attribute__((visibility("hidden"))) int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                                                 const struct timespec* deadline) {
  const int64_t second = 1000000000;
  struct timespec now, wall;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &wall) != 0) abort();
  int64_t left = (deadline->tv_sec - now.tv_sec) * second + deadline->tv_nsec - now.tv_nsec;
  if (left < 0) left = 0;
  const int64_t until = wall.tv_nsec + left;
  const struct timespec wall_deadline = {.tv_sec = wall.tv_sec + until / second, .tv_nsec = until % second};
  return pthread_cond_timedwait(condition, mutex, &wall_deadline);
}

/* glibc 2.36; std::random_device calls it. */
__attribute__((visibility("hidden"))) uint32_t arc4random(void) {
  uint32_t number = 0;
  if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) abort();
  return number;
}

#ifdef DLFO_STRUCT_HAS_EH_DBASE
/* glibc 2.35; the unwinder asks it for the table of frames of the object that holds `address`
   (dlfcn.h, manual "Dynamic Linker Introspection"). */
struct search {
  uintptr_t address;
  struct dl_find_object* found;
};

static int look(struct dl_phdr_info* info, size_t size, void* data) {
  struct search* search = data;
  struct dl_find_object found = {0};
  int inside = 0;
  (void)size;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)* header = &info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + header->p_vaddr;
    const uintptr_t end = begin + header->p_memsz;
    if (header->p_type == PT_GNU_EH_FRAME) found.dlfo_eh_frame = (void*)begin;
    if (header->p_type != PT_LOAD) continue;
    if (found.dlfo_map_start == NULL) found.dlfo_map_start = (void*)begin;
    found.dlfo_map_end = (void*)end;
    if (search->address >= begin && search->address < end) inside = 1;
  }
  if (!inside || found.dlfo_eh_frame == NULL) return 0;
  *search->found = found;
  return 1;
}

__attribute__((visibility("hidden"))) int _dl_find_object(void* address, struct dl_find_object* result) {
  struct search search = {(uintptr_t)address, result};
  return dl_iterate_phdr(look, &search) == 1 ? 0 : -1;
}
#endif
