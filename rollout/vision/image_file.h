// Images out of JPEG and PNG files, by libjpeg and libpng, as torchvision's decode_image in mode
// RGB decodes them: transparency is dropped, and the orientation that a camera noted is not looked
// at.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>

namespace ferry::rollout {

// -> [3, height, width], uint8. Throws Error(kUsage) naming `source` for other formats, for 16 bits
// a channel and for CMYK, Error(kCorrupt) for a file that is damaged.
at::Tensor decode_image(std::span<const std::byte> bytes, const std::string& source);

}  // namespace ferry::rollout
