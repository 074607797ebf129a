#include "trainer/replicas/weight_image.h"

#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/digest.h"
#include "models/device/host_memory.h"
#include "trainer/metrics/append_file.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

std::string path_of(const distckpt::Descriptor& memory) {
  return fmt::format("/proc/self/fd/{}", memory.get());
}

struct NamedTensor {
  std::string name{};  // with type and shape
  at::Tensor value{};
};

// The tensors that a model computes with, in its own order.
std::vector<NamedTensor> tensors_of(const models::GPTModel& model) {
  std::vector<NamedTensor> all;
  const auto& parameters = model.parameters();
  for (const auto& leaf : parameters.leaves()) {
    const auto value = leaf.value.detach();
    require(value.is_contiguous(), ErrorKind::kBug, "weights of replicas lie in one piece");
    std::string name;
    for (const auto at : leaf.parameters)
      name += (name.empty() ? "" : ", ") + parameters.all()[at].spec.key;
    name +=
        fmt::format(" {} [{}]", at::toString(value.scalar_type()), fmt::join(value.sizes(), ", "));
    all.push_back({std::move(name), value});
  }
  return all;
}

enum class Direction : std::uint8_t { kFromModel, kIntoModel };

// Gives tensors piece by piece as bytes of the host, which are theirs or go between them and a GPU.
class Pieces {
 public:
  Pieces(Direction direction, std::int64_t bytes) : direction_(direction), bytes_(bytes) {}

  // `use` takes the bytes of each piece, or fills them in.
  template <typename Use>
  void of(const at::Tensor& value, const Use& use) {
    const auto all = value.view({-1}).view(at::kByte);
    for (std::int64_t begin = 0; begin < all.numel(); begin += bytes_) {
      const auto piece = all.narrow(0, begin, std::min(bytes_, all.numel() - begin));
      const auto host =
          piece.is_cpu() ? piece : staging(piece.device()).narrow(0, 0, piece.numel());
      const bool is_copy = !piece.is_cpu();
      if (is_copy && direction_ == Direction::kFromModel) host.copy_(piece);
      use(std::span(static_cast<std::byte*>(host.mutable_data_ptr()), host.nbytes()));
      if (is_copy && direction_ == Direction::kIntoModel) piece.copy_(host);
    }
  }

 private:
  const at::Tensor& staging(c10::Device device) {
    if (!staging_.defined()) staging_ = models::host_bytes(bytes_, device);
    return staging_;
  }

  Direction direction_;
  std::int64_t bytes_;
  at::Tensor staging_;
};

}  // namespace

WeightImage::WeightImage(const models::GPTModel& model, bool digests, std::int64_t piece_bytes)
    : memory_(memfd_create("weights", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  require(static_cast<bool>(memory_), ErrorKind::kIo, "memory for the weights of replicas: {}",
          distckpt::system_error_text(errno));
  auto names = json::array(), marks = json::array();
  const AppendFile image(path_of(memory_));
  Pieces pieces(Direction::kFromModel, piece_bytes);
  for (const auto& [name, value] : tensors_of(model)) {
    names.push_back(name);
    pieces.of(value, [&](std::span<std::byte> bytes) {
      image.append({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      if (digests) marks.push_back(to_string(distckpt::digest_block(bytes)));
    });
  }
  constexpr auto kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
  require(fcntl(memory_.get(), F_ADD_SEALS, kSeals) == 0, ErrorKind::kIo,
          "the weights of replicas cannot be sealed: {}", distckpt::system_error_text(errno));
  packet_ = {
      {"tensors", std::move(names)}, {"digests", std::move(marks)}, {"piece_bytes", piece_bytes}};
}

distckpt::Descriptor WeightImage::memory() const {
  distckpt::Descriptor another(fcntl(memory_.get(), F_DUPFD_CLOEXEC, 0));
  require(static_cast<bool>(another), ErrorKind::kIo, "the weights of replicas: {}",
          distckpt::system_error_text(errno));
  return another;
}

void read_weights(const json& packet,
                  const distckpt::Descriptor& memory,
                  const models::GPTModel& model) {
  const auto tensors = tensors_of(model);
  const auto names = packet.at("tensors").get<std::vector<std::string>>();
  const auto digests = packet.at("digests").get<std::vector<std::string>>();
  require(names.size() == tensors.size(), ErrorKind::kLayout,
          "weights of {} tensors, where the model has {}", names.size(), tensors.size());
  const distckpt::ReadFile image(path_of(memory));
  std::int64_t offset = 0;
  std::size_t number = 0;  // of a piece
  Pieces pieces(Direction::kIntoModel, packet.at("piece_bytes"));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& name = tensors[i].name;
    require(names[i] == name, ErrorKind::kLayout, "weights of {}, where the model has {}", names[i],
            name);
    pieces.of(tensors[i].value, [&](std::span<std::byte> bytes) {
      image.read_at(offset, bytes);
      offset += static_cast<std::int64_t>(bytes.size());
      require(digests.empty() || digests.at(number++) == to_string(distckpt::digest_block(bytes)),
              ErrorKind::kCorrupt, "{}: the digests of what was sent and of what came differ",
              name);
    });
  }
  require(offset == image.size(), ErrorKind::kCorrupt,
          "weights of {} bytes, where the model has {}", image.size(), offset);
}

}  // namespace ferry::trainer
