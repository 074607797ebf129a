#include "trainer/replicas/weight_image.h"

#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/digest.h"
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
    require(value.is_contiguous() && value.is_cpu(), ErrorKind::kBug,
            "weights of replicas lie in one piece on the host");
    std::string name;
    for (const auto at : leaf.parameters)
      name += (name.empty() ? "" : ", ") + parameters.all()[at].spec.key;
    name +=
        fmt::format(" {} [{}]", at::toString(value.scalar_type()), fmt::join(value.sizes(), ", "));
    all.push_back({std::move(name), value});
  }
  return all;
}

std::span<std::byte> bytes_of(const at::Tensor& value) {
  return {static_cast<std::byte*>(value.mutable_data_ptr()), value.nbytes()};
}

}  // namespace

WeightImage::WeightImage(const models::GPTModel& model, bool digests)
    : memory_(memfd_create("weights", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  require(static_cast<bool>(memory_), ErrorKind::kIo, "memory for the weights of replicas: {}",
          distckpt::system_error_text(errno));
  auto names = json::array(), marks = json::array();
  const AppendFile image(path_of(memory_));
  for (const auto& [name, value] : tensors_of(model)) {
    const auto bytes = bytes_of(value);
    image.append({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    names.push_back(name);
    if (digests) marks.push_back(to_string(distckpt::digest_block(bytes)));
  }
  constexpr auto kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
  require(fcntl(memory_.get(), F_ADD_SEALS, kSeals) == 0, ErrorKind::kIo,
          "the weights of replicas cannot be sealed: {}", distckpt::system_error_text(errno));
  packet_ = {{"tensors", std::move(names)}, {"digests", std::move(marks)}};
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
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, value] = tensors[i];
    require(names[i] == name, ErrorKind::kLayout, "weights of {}, where the model has {}", names[i],
            name);
    const auto bytes = bytes_of(value);
    image.read_at(offset, bytes);
    offset += static_cast<std::int64_t>(bytes.size());
    require(digests.empty() || digests.at(i) == to_string(distckpt::digest_block(bytes)),
            ErrorKind::kCorrupt, "{}: the digests of what was sent and of what came differ", name);
  }
  require(offset == image.size(), ErrorKind::kCorrupt,
          "weights of {} bytes, where the model has {}", image.size(), offset);
}

}  // namespace ferry::trainer
