#include <fmt/format.h>

#include "cli/report/diff.h"
#include "distckpt/elements/difference.h"

namespace ferry::cli {

std::string format_bucket(std::size_t bucket) {
  const auto last = distckpt::largest_ulps_of(bucket);
  if (bucket < 3) return fmt::format("{}", last);
  return fmt::format("{}-{}", distckpt::largest_ulps_of(bucket - 1) + 1, last);
}

}  // namespace ferry::cli
