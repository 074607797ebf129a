#include "distckpt/execute/plane_codec.h"

// The choice of entropy coder is one of zstd's advanced parameters.
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "distckpt/base/error.h"
#include "distckpt/elements/byte_planes.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "sizes are encoded in place");

// Huffman-coded literals and next to no search for matches: the bytes of a plane are drawn from few
// values, but do not repeat.
constexpr int kLevel = -50;

// A plane whose bytes, counted in a sample, would not shrink by an eighth is not compressed.
constexpr std::size_t kSampleBytes = 4096;
constexpr double kMaxEntropy = 7.0;  // bits per byte

bool may_shrink(std::span<const std::byte> plane) {
  std::array<int, 256> counts{};
  const auto step = std::max<std::size_t>(1, plane.size() / kSampleBytes);
  int total = 0;
  for (std::size_t i = 0; i < plane.size(); i += step, ++total) {
    ++counts[std::to_integer<std::size_t>(plane[i])];
  }
  double entropy = 0;
  for (const auto count : counts) {
    const auto share = static_cast<double>(count) / total;
    if (count > 0) entropy -= share * std::log2(share);
  }
  return entropy < kMaxEntropy;
}

std::int64_t header_size(std::int64_t element_size) {
  return 4 + 4 * element_size;
}

std::uint32_t read_u32(std::span<const std::byte> bytes, std::int64_t offset) {
  std::uint32_t value = 0;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

void write_u32(std::span<std::byte> bytes, std::int64_t offset, std::int64_t value) {
  const auto small = static_cast<std::uint32_t>(value);
  std::memcpy(bytes.data() + offset, &small, sizeof small);
}

std::uint32_t checksum(std::string_view name, std::span<const std::byte> chunk) {
  return crc32(chunk.subspan(4), crc32(as_bytes(name)));
}

}  // namespace

std::int64_t max_encoded_size(std::int64_t decoded_size, std::int64_t element_size) {
  return header_size(element_size) + decoded_size;
}

std::uint32_t stated_checksum(std::span<const std::byte> encoded) {
  return encoded.size() < 4 ? 0 : read_u32(encoded, 0);
}

struct PlaneCodec::State {
  ZSTD_CCtx* compressor = ZSTD_createCCtx();
  ZSTD_DCtx* decompressor = ZSTD_createDCtx();
  std::vector<std::byte> planes;
  std::vector<std::byte> scratch;
  std::vector<std::byte> frame;

  State() {
    require(compressor != nullptr && decompressor != nullptr, ErrorKind::kIo,
            "zstd: out of memory");
    const auto set = [&](ZSTD_cParameter parameter, int value) {
      const auto result = ZSTD_CCtx_setParameter(compressor, parameter, value);
      require(ZSTD_isError(result) == 0, ErrorKind::kBug, "zstd: {}", ZSTD_getErrorName(result));
    };
    set(ZSTD_c_compressionLevel, kLevel);
    set(ZSTD_c_literalCompressionMode, ZSTD_lcm_huffman);
  }
  ~State() {
    ZSTD_freeCCtx(compressor);
    ZSTD_freeDCtx(decompressor);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // The frame of a plane, or nothing if it would not be shorter.
  std::span<const std::byte> compress(std::span<const std::byte> plane) {
    if (plane.empty() || !may_shrink(plane)) return {};
    frame.resize(plane.size());
    // A frame that has no room is no error, but a plane that does not shrink.
    const auto size =
        ZSTD_compress2(compressor, frame.data(), frame.size(), plane.data(), plane.size());
    if (ZSTD_isError(size) != 0 || size >= plane.size()) return {};
    return std::span(frame).first(size);
  }
};

PlaneCodec::PlaneCodec() : state_(std::make_unique<State>()) {}
PlaneCodec::~PlaneCodec() = default;
PlaneCodec::PlaneCodec(PlaneCodec&&) noexcept = default;
PlaneCodec& PlaneCodec::operator=(PlaneCodec&&) noexcept = default;

std::vector<std::byte> PlaneCodec::encode(std::span<const std::byte> decoded,
                                          std::int64_t element_size,
                                          std::string_view name) {
  auto& planes = state_->planes;
  planes.resize(decoded.size());
  split_planes(decoded, element_size, planes, state_->scratch);
  const auto plane_size = decoded.size() / static_cast<std::size_t>(element_size);
  std::vector<std::byte> chunk;
  chunk.reserve(static_cast<std::size_t>(
      max_encoded_size(static_cast<std::int64_t>(decoded.size()), element_size)));
  chunk.resize(static_cast<std::size_t>(header_size(element_size)));
  for (std::int64_t p = 0; p < element_size; ++p) {
    const auto plane =
        std::span(planes).subspan(static_cast<std::size_t>(p) * plane_size, plane_size);
    const auto frame = state_->compress(plane);
    const std::span<const std::byte> stored = frame.empty() ? plane : frame;
    write_u32(chunk, 4 + 4 * p, static_cast<std::int64_t>(stored.size()));
    chunk.insert(chunk.end(), stored.begin(), stored.end());
  }
  write_u32(chunk, 0, checksum(name, chunk));
  return chunk;
}

void PlaneCodec::decode(std::span<const std::byte> encoded,
                        std::int64_t element_size,
                        std::string_view name,
                        std::span<std::byte> decoded) {
  const auto header = header_size(element_size);
  require(static_cast<std::int64_t>(encoded.size()) >= header, ErrorKind::kCorrupt,
          "the chunk has {} bytes, fewer than its header", encoded.size());
  const auto stated = stated_checksum(encoded);
  const auto found = checksum(name, encoded);
  require(stated == found, ErrorKind::kCorrupt, "the chunk has CRC-32 {:08x}, it says {:08x}",
          found, stated);
  const auto plane_size = decoded.size() / static_cast<std::size_t>(element_size);
  auto& planes = state_->planes;
  planes.resize(decoded.size());
  std::array<const std::byte*, 8> begins{};
  auto at = static_cast<std::size_t>(header);
  for (std::int64_t p = 0; p < element_size; ++p) {
    const auto size = read_u32(encoded, 4 + 4 * p);
    require(size <= plane_size && size <= encoded.size() - at, ErrorKind::kCorrupt,
            "plane {} of the chunk has {} bytes, of {} at most", p, size,
            std::min(plane_size, encoded.size() - at));
    auto& begin = begins[static_cast<std::size_t>(p)];
    begin = encoded.data() + at;
    if (size < plane_size) {
      auto* const into = planes.data() + static_cast<std::size_t>(p) * plane_size;
      const auto written = ZSTD_decompressDCtx(state_->decompressor, into, plane_size, begin, size);
      require(ZSTD_isError(written) == 0, ErrorKind::kCorrupt, "plane {} of the chunk: zstd: {}", p,
              ZSTD_getErrorName(written));
      require(written == plane_size, ErrorKind::kCorrupt,
              "plane {} of the chunk has {} bytes, expected {}", p, written, plane_size);
      begin = into;
    }
    at += size;
  }
  require(at == encoded.size(), ErrorKind::kCorrupt, "the chunk has {} bytes too many",
          encoded.size() - at);
  join_planes(std::span(begins).first(static_cast<std::size_t>(element_size)), decoded,
              state_->scratch);
}

}  // namespace ferry::distckpt
