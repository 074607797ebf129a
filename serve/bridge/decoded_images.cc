#include "serve/bridge/decoded_images.h"

#include <algorithm>

namespace ferry::serve {

// Files are the same if they are those of the same chat: nobody compares their bytes.
std::vector<rollout::ProcessedImage> DecodedImages::read(const ImageFiles& files) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(held_, [&](const Entry& entry) {
      return !entry.files.owner_before(files) && !files.owner_before(entry.files);
    });
    if (found != held_.end()) {
      held_.splice(held_.begin(), held_, found);
      return held_.front().images;
    }
  }
  std::vector<rollout::ProcessedImage> images;
  for (const auto& file : *files) {
    const rollout::text::ImageSource source{.bytes = file};
    images.push_back(std::move(rollout::read_images({&source, 1}, reader_).front()));
  }
  const std::lock_guard lock(mutex_);
  ++num_decoded_;
  held_.push_front({.files = files, .images = images});
  forget();
  return images;
}

// Forgets chats that have ended, and the oldest beyond what there is room for.
void DecodedImages::forget() {
  std::erase_if(held_, [](const Entry& entry) { return entry.files.expired(); });
  auto room = held_bytes_;
  auto entry = held_.begin();
  for (; entry != held_.end(); ++entry) {
    for (const auto& image : entry->images)
      room -= static_cast<std::int64_t>(image.pixels.nbytes());
    if (room < 0) break;
  }
  held_.erase(entry, held_.end());
}

}  // namespace ferry::serve
