// The archive in a program that was built without it.
#include "distckpt/base/error.h"
#include "distckpt/execute/plane_codec.h"
#include "distckpt/formats/archive/shard_store.h"

namespace ferry::distckpt {
namespace {

[[noreturn]] void absent() {
  throw Error(ErrorKind::kUsage, "this program was built without HDF5, which the archive needs",
              "install libhdf5-dev and libzstd-dev and build with: meson configure -Dhdf5=enabled");
}

}  // namespace

std::int64_t max_encoded_size(std::int64_t, std::int64_t) {
  absent();
}
std::uint32_t stated_checksum(std::span<const std::byte>) {
  absent();
}
struct PlaneCodec::State {};
PlaneCodec::PlaneCodec() {
  absent();
}
PlaneCodec::~PlaneCodec() = default;
PlaneCodec::PlaneCodec(PlaneCodec&&) noexcept = default;
PlaneCodec& PlaneCodec::operator=(PlaneCodec&&) noexcept = default;
std::vector<std::byte> PlaneCodec::encode(std::span<const std::byte>,
                                          std::int64_t,
                                          std::string_view) {
  absent();
}
void PlaneCodec::decode(std::span<const std::byte>,
                        std::int64_t,
                        std::string_view,
                        std::span<std::byte>) {
  absent();
}

ShardStore read_shard_store(const std::filesystem::path&) {
  absent();
}
struct ShardStoreTarget::State {};
ShardStoreTarget::ShardStoreTarget(std::filesystem::path,
                                   const std::vector<ShardStoreTensor>&,
                                   const ShardStoreOptions&) {
  absent();
}
ShardStoreTarget::~ShardStoreTarget() = default;
const Layout& ShardStoreTarget::layout() const {
  absent();
}
BoxSink& ShardStoreTarget::open(const CopyPlan&, Journal&) {
  absent();
}
void ShardStoreTarget::finish(const std::map<std::string, std::string>&) {
  absent();
}

}  // namespace ferry::distckpt
