#include "distckpt/formats/archive/hdf5_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "distckpt/base/integers.h"

namespace ferry::distckpt {
namespace {

constexpr std::size_t kReserveBytes = std::size_t{4} << 20;
constexpr std::size_t kAlignment = alignof(std::max_align_t);

std::atomic<std::byte*> reserve = nullptr;  // made once, never given back
std::size_t reserve_used = 0;               // changed by the thread with an Hdf5Memory
thread_local int depth = 0;                 // of Hdf5Memory objects

bool in_reserve(const void* data) {
  const auto* const begin = reserve.load(std::memory_order_relaxed);
  const auto distance =
      reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(begin);
  return begin != nullptr && distance < kReserveBytes;
}

// Zeros, with their size before them. They are not used again: whoever needs them is about to end.
void* take_reserve(std::size_t size) {
  if (depth == 0 || size > kReserveBytes) return nullptr;
  const auto bytes = kAlignment + round_up(size, kAlignment);
  if (bytes > kReserveBytes - reserve_used) return nullptr;
  auto* const data = reserve.load(std::memory_order_relaxed) + reserve_used;
  reserve_used += bytes;
  std::memcpy(data, &size, sizeof(size));
  return data + kAlignment;
}

}  // namespace

Hdf5Memory::Hdf5Memory() {
  if (reserve == nullptr) {
    void* const made = mmap(nullptr, kReserveBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    reserve = static_cast<std::byte*>(made);
  }
  ++depth;
}

Hdf5Memory::~Hdf5Memory() {
  --depth;
}

void require_hdf5_memory() {
  if (reserve_used > 0) throw std::bad_alloc();
}

extern "C" {

// The names that the linker gives with --wrap=malloc and so on.
void* real_malloc(std::size_t size) __asm__("__real_malloc");
void* real_calloc(std::size_t count, std::size_t size) __asm__("__real_calloc");
void* real_realloc(void* data, std::size_t size) __asm__("__real_realloc");
void real_free(void* data) __asm__("__real_free");
void* wrap_malloc(std::size_t size) __asm__("__wrap_malloc");
void* wrap_calloc(std::size_t count, std::size_t size) __asm__("__wrap_calloc");
void* wrap_realloc(void* data, std::size_t size) __asm__("__wrap_realloc");
char* wrap_strdup(const char* text) __asm__("__wrap_strdup");
void wrap_free(void* data) __asm__("__wrap_free");

void* wrap_malloc(std::size_t size) {
  void* const data = real_malloc(size);
  return data != nullptr ? data : take_reserve(size);
}

void* wrap_calloc(std::size_t count, std::size_t size) {
  void* const data = real_calloc(count, size);
  std::size_t bytes = 0;
  if (data != nullptr || __builtin_mul_overflow(count, size, &bytes)) return data;
  return take_reserve(bytes);
}

void* wrap_realloc(void* data, std::size_t size) {
  const bool reserved = in_reserve(data);
  if (!reserved) {
    void* const grown = real_realloc(data, size);
    if (grown != nullptr || size == 0) return grown;
  }
  void* const moved = reserved ? wrap_malloc(size) : take_reserve(size);
  if (moved == nullptr || data == nullptr) return moved;
  std::size_t old_size = 0;
  if (reserved) {
    std::memcpy(&old_size, static_cast<std::byte*>(data) - kAlignment, sizeof(old_size));
  } else {
    old_size = malloc_usable_size(data);
  }
  std::memcpy(moved, data, std::min(old_size, size));
  wrap_free(data);
  return moved;
}

char* wrap_strdup(const char* text) {
  const auto size = std::strlen(text) + 1;
  void* const copy = wrap_malloc(size);
  return copy == nullptr ? nullptr : static_cast<char*>(std::memcpy(copy, text, size));
}

void wrap_free(void* data) {
  if (!in_reserve(data)) real_free(data);
}

}  // extern "C"

}  // namespace ferry::distckpt
