// Images of chats, decoded once for the thread that counts their tokens and for the engines of its
// process: those of the last chats are held until they end, or there is no room.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "rollout/vision/prompt_images.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

class DecodedImages {
 public:
  static constexpr std::int64_t kHeldBytes = std::int64_t{256} << 20;

  explicit DecodedImages(rollout::ImageReader reader, std::int64_t held_bytes = kHeldBytes)
      : reader_(std::move(reader)), held_bytes_(held_bytes) {}

  // The images of the files, decoded and resized. Called by any thread. Throws Error that names the
  // image.
  std::vector<rollout::ProcessedImage> read(const ImageFiles& files);
  const rollout::ImageReader& reader() const { return reader_; }
  std::int64_t num_decoded() const { return num_decoded_; }  // chats

 private:
  struct Entry {
    std::weak_ptr<const std::vector<std::string>> files{};
    std::vector<rollout::ProcessedImage> images{};
  };

  void forget();

  rollout::ImageReader reader_;
  std::int64_t held_bytes_;
  std::int64_t num_decoded_ = 0;
  std::mutex mutex_;
  std::list<Entry> held_;  // the one that was asked for last is first
};

}  // namespace ferry::serve
