#include "trainer/algorithms/overlong_penalty.h"

#include <algorithm>

#include "distckpt/base/error.h"

namespace ferry::trainer {

double overlong_penalty(std::int64_t response_length,
                        std::int64_t max_resp_len,
                        const OverlongBufferConfig& buffer) {
  require(buffer.len > 0, ErrorKind::kUsage, "overlong_buffer: len {} is not positive", buffer.len);
  require(max_resp_len >= buffer.len, ErrorKind::kUsage,
          "overlong_buffer: len {} is above max_resp_len {}", buffer.len, max_resp_len);
  const auto exceeding = static_cast<double>(response_length - (max_resp_len - buffer.len));
  return std::min(-exceeding / static_cast<double>(buffer.len) * buffer.penalty_factor, 0.0);
}

}  // namespace ferry::trainer
