#include "converter/delta/difference_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are encoded in place");

enum class ChunkKind : std::uint8_t {
  kSparse = 1,  // gaps between elements that changed, and their differences
  kDense = 2,   // the differences of all elements
};

// Gaps cost about as much as the differences of elements that stay where one in this many changes.
constexpr std::int64_t kSparseBelow = 4;

// A gap of this and more goes on in the next byte.
constexpr std::size_t kLongGap = 255;

constexpr std::size_t kSparseHeader = 1 + 3 * sizeof(std::uint32_t);

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// A small step up or down is a small number: 0, -1, 1, -2 become 0, 1, 2, 3.
template <typename T>
T step(T old, T now) {
  const auto difference = static_cast<T>(now - old);
  const bool down = (difference >> (8 * sizeof(T) - 1)) != 0;
  const auto doubled = static_cast<T>(difference << 1);
  return down ? static_cast<T>(~doubled) : doubled;
}

template <typename T>
T after_step(T old, T step) {
  const auto half = static_cast<T>(step >> 1);
  return static_cast<T>(old + ((step & 1U) != 0 ? static_cast<T>(~half) : half));
}

// Calls visit(index) for each element that changed, in order.
template <typename T, typename Visit>
void for_each_changed(std::span<const std::byte> old,
                      std::span<const std::byte> now,
                      Visit&& visit) {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const auto size = old.size();
  std::size_t at = 0;
  const auto look = [&](std::size_t end) {
    for (; at < end; at += sizeof(T)) {
      if (load<T>(old.data() + at) != load<T>(now.data() + at)) visit(at / sizeof(T));
    }
  };
  while (at + kWord <= size) {
    if (load<std::uint64_t>(old.data() + at) == load<std::uint64_t>(now.data() + at)) {
      at += kWord;
    } else {
      look(at + kWord);
    }
  }
  look(size);
}

void append_gap(std::vector<std::byte>& gaps, std::size_t gap) {
  for (; gap >= kLongGap; gap -= kLongGap) gaps.push_back(std::byte{kLongGap});
  gaps.push_back(static_cast<std::byte>(gap));
}

template <typename T>
std::int64_t count_changed(std::span<const std::byte> old, std::span<const std::byte> now) {
  std::int64_t count = 0;
  for_each_changed<T>(old, now, [&](std::size_t) { ++count; });
  return count;
}

// Gaps and differences of the elements that changed.
template <typename T>
void take_sparse(std::span<const std::byte> old,
                 std::span<const std::byte> now,
                 std::vector<std::byte>& gaps,
                 std::vector<std::byte>& numbers) {
  std::size_t next = 0;
  std::size_t filled = 0;
  for_each_changed<T>(old, now, [&](std::size_t index) {
    append_gap(gaps, index - next);
    next = index + 1;
    store(numbers.data() + filled,
          step(load<T>(old.data() + index * sizeof(T)), load<T>(now.data() + index * sizeof(T))));
    filled += sizeof(T);
  });
}

template <typename T>
void take_dense(std::span<const std::byte> old,
                std::span<const std::byte> now,
                std::vector<std::byte>& numbers) {
  for (std::size_t at = 0; at < old.size(); at += sizeof(T))
    store(numbers.data() + at, step(load<T>(old.data() + at), load<T>(now.data() + at)));
}

template <typename T>
void apply_sparse(std::span<const std::byte> gaps,
                  std::span<const std::byte> numbers,
                  std::span<std::byte> elements) {
  const auto count = elements.size() / sizeof(T);
  std::size_t next = 0;
  std::size_t gap = 0;
  std::size_t used = 0;
  for (const auto one : gaps) {
    gap += std::to_integer<std::size_t>(one);
    if (one == std::byte{kLongGap}) continue;
    const auto index = next + gap;
    require(index < count && used < numbers.size(), ErrorKind::kCorrupt,
            "the chunk changes element {} of {}", index, count);
    auto* const at = elements.data() + index * sizeof(T);
    store(at, after_step(load<T>(at), load<T>(numbers.data() + used)));
    used += sizeof(T);
    next = index + 1;
    gap = 0;
  }
  require(used == numbers.size(), ErrorKind::kCorrupt, "the chunk names {} elements, expected {}",
          used / sizeof(T), numbers.size() / sizeof(T));
}

template <typename T>
std::int64_t apply_dense(std::span<const std::byte> numbers, std::span<std::byte> elements) {
  std::int64_t num_changed = 0;
  for (std::size_t at = 0; at < elements.size(); at += sizeof(T)) {
    auto* const element = elements.data() + at;
    const auto number = load<T>(numbers.data() + at);
    num_changed += number != 0 ? 1 : 0;
    store(element, after_step(load<T>(element), number));
  }
  return num_changed;
}

// Calls use(T{}) with the unsigned number of that size.
template <typename Use>
auto with_number(std::int64_t element_size, Use&& use) {
  switch (element_size) {
    case 1:
      return use(std::uint8_t{});
    case 2:
      return use(std::uint16_t{});
    case 4:
      return use(std::uint32_t{});
    case 8:
      return use(std::uint64_t{});
    default:
      fail(ErrorKind::kLayout, "elements of {} bytes have no differences", element_size);
  }
}

// The checksums of a sparse chunk's two parts cover its header, too.
std::string part_name(std::string_view name,
                      std::string_view part,
                      std::uint32_t count,
                      std::uint32_t gaps) {
  return fmt::format("{} {} {} {}", name, part, count, gaps);
}

}  // namespace

std::vector<std::int64_t> changed_elements(std::span<const std::byte> old,
                                           std::span<const std::byte> now,
                                           std::int64_t element_size) {
  std::vector<std::int64_t> changed;
  with_number(element_size, [&](auto number) {
    for_each_changed<decltype(number)>(
        old, now, [&](std::size_t index) { changed.push_back(static_cast<std::int64_t>(index)); });
  });
  return changed;
}

std::string chunk_name(std::string_view tensor, std::size_t chunk) {
  return fmt::format("{}[{}]", tensor, chunk);
}

Difference DifferenceCodec::encode(std::span<const std::byte> old,
                                   std::span<const std::byte> now,
                                   std::int64_t element_size,
                                   std::string_view name) {
  const auto count = with_number(
      element_size, [&](auto number) { return count_changed<decltype(number)>(old, now); });
  Difference difference{.encoded = {}, .num_changed = count};
  auto& into = difference.encoded;
  if (count * kSparseBelow > static_cast<std::int64_t>(old.size()) / element_size) {
    numbers_.resize(old.size());
    with_number(element_size,
                [&](auto number) { take_dense<decltype(number)>(old, now, numbers_); });
    const auto planes = planes_.encode(numbers_, element_size, name);
    into.push_back(static_cast<std::byte>(ChunkKind::kDense));
    into.insert(into.end(), planes.begin(), planes.end());
    return difference;
  }
  gaps_.clear();
  numbers_.resize(static_cast<std::size_t>(count * element_size));
  with_number(element_size,
              [&](auto number) { take_sparse<decltype(number)>(old, now, gaps_, numbers_); });
  const auto num_changed = static_cast<std::uint32_t>(count);
  const auto num_gaps = static_cast<std::uint32_t>(gaps_.size());
  const auto gaps = planes_.encode(gaps_, 1, part_name(name, "gaps", num_changed, num_gaps));
  const auto numbers =
      planes_.encode(numbers_, element_size, part_name(name, "numbers", num_changed, num_gaps));
  into.resize(kSparseHeader);
  into[0] = static_cast<std::byte>(ChunkKind::kSparse);
  store(into.data() + 1, num_changed);
  store(into.data() + 5, num_gaps);
  store(into.data() + 9, static_cast<std::uint32_t>(gaps.size()));
  into.insert(into.end(), gaps.begin(), gaps.end());
  into.insert(into.end(), numbers.begin(), numbers.end());
  return difference;
}

std::int64_t DifferenceCodec::apply(std::span<const std::byte> encoded,
                                    std::int64_t element_size,
                                    std::string_view name,
                                    std::span<std::byte> elements) {
  require(!encoded.empty(), ErrorKind::kCorrupt, "the chunk is empty");
  const auto kind = static_cast<ChunkKind>(encoded[0]);
  if (kind == ChunkKind::kDense) {
    numbers_.resize(elements.size());
    planes_.decode(encoded.subspan(1), element_size, name, numbers_);
    return with_number(element_size, [&](auto number) {
      return apply_dense<decltype(number)>(numbers_, elements);
    });
  }
  require(kind == ChunkKind::kSparse, ErrorKind::kCorrupt, "the chunk is of the unknown kind {}",
          std::to_integer<int>(encoded[0]));
  require(encoded.size() >= kSparseHeader, ErrorKind::kCorrupt,
          "the chunk has {} bytes, fewer than its header", encoded.size());
  const auto num_changed = load<std::uint32_t>(encoded.data() + 1);
  const auto num_gaps = load<std::uint32_t>(encoded.data() + 5);
  const auto gaps_size = load<std::uint32_t>(encoded.data() + 9);
  const auto count = elements.size() / static_cast<std::size_t>(element_size);
  require(num_changed <= count && num_gaps <= num_changed + count / kLongGap &&
              gaps_size <= encoded.size() - kSparseHeader,
          ErrorKind::kCorrupt, "the chunk changes {} of {} elements in {} gaps of {} bytes",
          num_changed, count, num_gaps, gaps_size);
  gaps_.resize(num_gaps);
  numbers_.resize(num_changed * static_cast<std::size_t>(element_size));
  planes_.decode(encoded.subspan(kSparseHeader, gaps_size), 1,
                 part_name(name, "gaps", num_changed, num_gaps), gaps_);
  planes_.decode(encoded.subspan(kSparseHeader + gaps_size), element_size,
                 part_name(name, "numbers", num_changed, num_gaps), numbers_);
  with_number(element_size,
              [&](auto number) { apply_sparse<decltype(number)>(gaps_, numbers_, elements); });
  return num_changed;
}

}  // namespace ferry::converter
