#include "models/reshard/device_box_io.h"

namespace ferry::models {

std::unique_ptr<distckpt::MemorySink> make_memory_sink(const distckpt::Layout& layout) {
  return std::make_unique<distckpt::MemorySink>(layout);
}

std::unique_ptr<distckpt::BoxSource> make_memory_source(const distckpt::Layout& layout) {
  return std::make_unique<distckpt::MemorySource>(layout);
}

std::pmr::memory_resource* staging_memory() {
  return std::pmr::new_delete_resource();
}

}  // namespace ferry::models
