// The codec of the archive's chunks. The bytes of an element are taken apart into planes, since the
// exponents of weights are few and their mantissas are noise: a plane that shrinks is a zstd frame,
// one that does not is stored as it is. docs/formats/hdf5.md gives the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace ferry::distckpt {

// The largest number of bytes that an encoded chunk of `decoded_size` bytes may have.
std::int64_t max_encoded_size(std::int64_t decoded_size, std::int64_t element_size);

// The checksum that an encoded chunk states of itself; 0 if it is too short for one.
std::uint32_t stated_checksum(std::span<const std::byte> encoded);

// Encodes and decodes chunks of elements of 1, 2, 4 or 8 bytes. Holds the compressor's state and
// scratch memory: one for each thread.
class PlaneCodec {
 public:
  PlaneCodec();
  ~PlaneCodec();
  PlaneCodec(PlaneCodec&&) noexcept;
  PlaneCodec& operator=(PlaneCodec&&) noexcept;

  // `name` says which chunk of which tensor it is: the checksum covers it too, so that a chunk that
  // lies in the place of another is noticed. The same bytes give the same encoded bytes.
  std::vector<std::byte> encode(std::span<const std::byte> decoded,
                                std::int64_t element_size,
                                std::string_view name);

  // Fills `decoded`. Throws Error(kCorrupt) saying what is wrong; the caller says where.
  void decode(std::span<const std::byte> encoded,
              std::int64_t element_size,
              std::string_view name,
              std::span<std::byte> decoded);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ferry::distckpt
