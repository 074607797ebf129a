// The values of a Pickle, in a few flat arrays: the parser fills them, and PickleValue reads them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_opcodes.h"

namespace ferry::distckpt::detail {

static_assert(std::endian::native == std::endian::little, "pickles are decoded in place");

// A value in eight bytes. The low four bits are its kind; the others are
// - of bools and ints: the value, if 60 bits hold it
// - of wide ints, big ints, floats, strings, bytes: the position of the opcode in the source, where
//   the value is decoded whenever it is asked for
// - of tuples: where the count stands in `cells`; the elements follow it
// - of lists, sets, dicts: an index into `sequences`
// - of globals, objects: an index into `globals`, `objects`
// - of persistent ids: where the id's own cell stands in `cells`
using Cell = std::uint64_t;

inline constexpr std::uint64_t kWideInt = 14;  // an int as well: kinds end at 13
inline constexpr Cell kAbsent = 15;            // no value: a gap in the memo
inline constexpr std::size_t kMaxGlobalName = 1'024;

constexpr Cell cell_of(PickleKind kind, std::uint64_t payload) {
  return payload << 4 | static_cast<std::uint64_t>(kind);
}
constexpr std::uint64_t tag_of(Cell cell) {
  return cell & 0xF;
}
constexpr std::uint64_t payload_of(Cell cell) {
  return cell >> 4;
}
constexpr PickleKind kind_of(Cell cell) {
  return tag_of(cell) == kWideInt ? PickleKind::kInt : static_cast<PickleKind>(tag_of(cell));
}

inline constexpr Cell kNoneCell = cell_of(PickleKind::kNone, 0);
inline constexpr Cell kEmptyTupleCell = cell_of(PickleKind::kTuple, 0);  // cells[0] is its count

template <typename T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A list, a set, or a dict (keys and values alternating), in `cells`. It grows as opcodes append to
// it.
struct Sequence {
  std::uint64_t first = 0;
  std::uint32_t count = 0;     // of cells
  std::uint32_t capacity = 0;  // of cells
};

struct Object {
  Cell class_name{};
  Cell args{};
  Cell state{};
};

struct ObjectExtras {
  Cell items = kNoneCell;
  Cell appended = kNoneCell;
};

struct PickleNodes {
  std::string bytes{};
  std::string source{};
  std::int64_t first_byte = 0;
  Cell root = kNoneCell;

  std::vector<Cell> cells{0};
  std::vector<Sequence> sequences{};
  std::vector<Object> objects{};
  std::unordered_map<std::uint64_t, ObjectExtras> extras{};  // few objects have any
  std::deque<std::string> globals{};                         // stable: views point here

  PickleValue value(Cell cell) const { return {this, cell}; }

  // The text of a string, bytes or big int opcode at `position`. The parser has checked that it
  // lies inside.
  std::string_view text_at(std::uint64_t position) const {
    const char* at = bytes.data() + position;
    switch (static_cast<unsigned char>(*at)) {
      case opcode::kShortBinUnicode:
      case opcode::kShortBinBytes:
      case opcode::kShortBinString:
      case opcode::kLong1:
        return {at + 2, static_cast<unsigned char>(at[1])};
      case opcode::kBinUnicode:
      case opcode::kBinBytes:
      case opcode::kBinString:
      case opcode::kLong4:
        return {at + 5, load<std::uint32_t>(at + 1)};
      default:  // opcode::kBinUnicode8, opcode::kBinBytes8, opcode::kByteArray8
        return {at + 9, static_cast<std::size_t>(load<std::uint64_t>(at + 1))};
    }
  }

  double float_at(std::uint64_t position) const {
    return std::bit_cast<double>(
        __builtin_bswap64(load<std::uint64_t>(bytes.data() + position + 1)));
  }

  std::int64_t int_of(Cell cell) const {
    if (tag_of(cell) != kWideInt) return static_cast<std::int64_t>(cell) >> 4;
    const std::string_view digits = text_at(payload_of(cell));
    std::uint64_t value = (digits.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    std::memcpy(&value, digits.data(), digits.size());
    return static_cast<std::int64_t>(value);
  }

  // The cells inside a list, tuple, set or dict; of a dict, keys and values. Valid until cells are
  // added.
  std::span<const Cell> inside(Cell cell) const {
    const std::uint64_t payload = payload_of(cell);
    if (kind_of(cell) == PickleKind::kTuple)
      return std::span(cells).subspan(payload + 1, cells[payload]);
    const Sequence& sequence = sequences[payload];
    return std::span(cells).subspan(sequence.first, sequence.count);
  }

  // Visits the cells that a value holds: those of containers, and the parts of objects.
  template <typename Visit>
  void for_each_child(Cell cell, Visit&& visit) const {
    switch (kind_of(cell)) {
      case PickleKind::kList:
      case PickleKind::kTuple:
      case PickleKind::kDict:
      case PickleKind::kSet: {
        std::ranges::for_each(inside(cell), visit);
        break;
      }
      case PickleKind::kObject: {
        const Object& object = objects[payload_of(cell)];
        visit(object.args);
        visit(object.state);
        if (const auto extra = extras.find(payload_of(cell)); extra != extras.end()) {
          visit(extra->second.items);
          visit(extra->second.appended);
        }
        break;
      }
      case PickleKind::kPersistentId:
        visit(cells[payload_of(cell)]);
        break;
      default:
        break;
    }
  }

  void describe(Cell cell, std::size_t max_length, int depth, std::string& out) const;
};

// Text from a file, as messages show it: at most `max_length` bytes, control characters escaped.
std::string printable(std::string_view text, std::size_t max_length);

}  // namespace ferry::distckpt::detail
