// Objects of a bucket, as files: the slashes of their keys make folders.
#include "distckpt/storage/network/s3_client.h"
#include "distckpt/storage/remote_store.h"

namespace ferry::distckpt {
namespace {

class S3Store : public RemoteStore {
 public:
  RemoteList list(const std::string& folder) override {
    const auto place = parse_s3_address(folder);
    RemoteList found;
    s3_list(place, place.key.empty() ? "" : place.key + "/",
            [&](const std::string& key, std::int64_t size) {
              if (key.ends_with('/')) return;  // consoles make such objects for empty folders
              found.files.push_back(
                  {.address = S3Place{.bucket = place.bucket, .key = key}.address(), .size = size});
            });
    return found;
  }

  HttpRequest request(const std::string& address) override {
    return s3_request("GET", parse_s3_address(address));
  }
};

}  // namespace

std::unique_ptr<RemoteStore> make_s3_store() {
  return std::make_unique<S3Store>();
}

}  // namespace ferry::distckpt
