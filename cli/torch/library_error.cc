#include "cli/torch/library_error.h"

#include "models/device/memory_error.h"

namespace ferry::cli {

Error library_error(const c10::Error& error) {
  return models::error_of(error, "here",
                          "fewer tokens at a time, or the model shared over more ranks");
}

}  // namespace ferry::cli
