#include "distckpt/base/error.h"
#include "rollout/vision/image_file.h"

namespace ferry::rollout {

at::Tensor decode_image(std::span<const std::byte>,
                        const std::string& source,
                        std::int64_t /*most_pixels*/) {
  throw Error(ErrorKind::kUsage, fmt::format("{}: this build decodes no images", source),
              "install libjpeg-dev and libpng-dev and configure it again");
}

}  // namespace ferry::rollout
