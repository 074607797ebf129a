// Images out of JPEG and PNG files, by libjpeg and libpng, as torchvision's decode_image in mode
// RGB decodes them: transparency is dropped, and the orientation that a camera noted is not looked
// at.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

namespace ferry::rollout {

constexpr std::int64_t kMostPixels = std::int64_t{1} << 28;

// -> [3, height, width], uint8. Throws Error(kUsage) naming `source` for other formats, for 16 bits
// a channel and for more than `most_pixels`, Error(kCorrupt) for a file that is damaged.
at::Tensor decode_image(std::span<const std::byte> bytes,
                        const std::string& source,
                        std::int64_t most_pixels = kMostPixels);

}  // namespace ferry::rollout
