/* Two functions of newer C libraries that GCC 12's static runtime calls, so that the programs of a release run with glibc 2.34:
   RHEL 9, Amazon Linux 2023 and Ubuntu 22.04 have 2.34 and 2.35. -Dstatic_runtime=true links them in. */
#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

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
