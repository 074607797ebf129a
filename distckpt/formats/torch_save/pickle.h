// A pickle, parsed into plain data: nothing is imported, called or executed. Objects of classes
// stay what the bytes say (a class name, constructor arguments, state). Compact: about 8 bytes a
// value, strings are views into the source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/base/box.h"

namespace ferry::distckpt {

namespace detail {
struct PickleNodes;

// The values that `at` gives for 0, 1, ... below `size`, for a range-for. A view of <ranges> would
// do, but clang 14, which lints, cannot compile those of libstdc++ 12.
template <typename At>
class Indexed {
 public:
  class Iterator {
   public:
    Iterator(const At* at, std::size_t index) : at_(at), index_(index) {}
    auto operator*() const { return (*at_)(index_); }
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return index_ == other.index_; }

   private:
    const At* at_;
    std::size_t index_;
  };

  Indexed(std::size_t size, At at) : size_(size), at_(std::move(at)) {}
  Iterator begin() const { return {&at_, 0}; }
  Iterator end() const { return {&at_, size_}; }

 private:
  std::size_t size_;
  At at_;
};
}  // namespace detail

enum class PickleKind : std::uint8_t {
  kNone,
  kBool,
  kInt,
  kBigInt,  // beyond int64: its bytes only, little endian, two's complement
  kFloat,
  kString,
  kBytes,
  kList,
  kTuple,
  kDict,  // also OrderedDict
  kSet,
  kGlobal,        // a class or function, by name
  kObject,        // what calling or instantiating a global would have given
  kPersistentId,  // torch: ('storage', storage class, key, location, number of elements)
};

std::string_view to_string(PickleKind kind);  // "dict": for messages

// A handle into a Pickle, which must outlive it. Accessors throw Error(kCorrupt) naming the file,
// what was expected and what is there. A value may be reached twice, or hold itself: see
// require_tree.
class PickleValue {
 public:
  PickleKind kind() const;
  bool is_none() const { return kind() == PickleKind::kNone; }

  bool as_bool() const;
  std::int64_t as_int() const;
  double as_float() const;             // an int counts
  std::string_view as_string() const;  // UTF-8
  std::string_view as_bytes() const;   // bytes, or the bytes of a big int

  // Lists, tuples and sets: elements. Dicts: items.
  std::size_t size() const;

  // Lists and tuples. Throws beyond the end.
  PickleValue operator[](std::size_t index) const;

  // `for (const PickleValue element : value.elements())`: lists, tuples, sets.
  auto elements() const {
    const auto cells = element_cells();
    return detail::Indexed(cells.size(), [nodes = nodes_, cells](std::size_t i) {
      return PickleValue(nodes, cells[i]);
    });
  }

  // `for (const auto& [key, value] : value.items())`: dicts, in order.
  auto items() const {
    const auto cells = item_cells();
    return detail::Indexed(cells.size() / 2, [nodes = nodes_, cells](std::size_t i) {
      return std::pair(PickleValue(nodes, cells[2 * i]), PickleValue(nodes, cells[2 * i + 1]));
    });
  }

  // Dicts, and the state of objects (failing that, their items): the value under a string key.
  // Linear; a key that occurs twice gives the last value, as Python does.
  std::optional<PickleValue> find(std::string_view key) const;
  PickleValue at(std::string_view key) const;  // throws if absent

  std::string_view global_name() const;  // "torch.bfloat16"

  // Objects.
  std::string_view object_class() const;  // "argparse.Namespace"
  PickleValue object_args() const;        // a tuple
  PickleValue object_state() const;       // what BUILD set; None if nothing
  PickleValue object_items() const;       // a dict: what SETITEM(S) set; None if nothing
  PickleValue object_appended() const;    // a list: what APPEND(S) added; None if nothing
  bool is_object(std::string_view class_name) const;  // false for every other kind

  PickleValue persistent_id() const;

  // Throws unless walking this value to its leaves meets at most `max_values` values and
  // `max_depth` levels. Before walking by recursion: a list may hold itself, and shared lists may
  // multiply.
  void require_tree(std::size_t max_values, int max_depth) const;

  // The value as Python would print it, cut to about `max_length` bytes. Safe for every value.
  std::string describe(std::size_t max_length = 120) const;

  // Throws Error(kCorrupt) `FILE: the pickle holds 7 where a dict is expected`.
  [[noreturn]] void fail_expected(std::string_view expected) const;

 private:
  friend class Pickle;
  friend struct detail::PickleNodes;
  PickleValue(const detail::PickleNodes* nodes, std::uint64_t cell) : nodes_(nodes), cell_(cell) {}

  void expect(PickleKind kind) const;
  std::span<const std::uint64_t> element_cells() const;
  std::span<const std::uint64_t> item_cells() const;  // keys and values in turns

  const detail::PickleNodes* nodes_;
  std::uint64_t cell_;  // kind in the low four bits; above them a small value, or where to find it
};

struct PickleOptions {
  // The file, as messages call it, and where in it the pickle begins: they count from there.
  std::string source{};
  std::int64_t first_byte = 0;

  // The globals that may occur: "torch.Size" is one, "megatron.core." with its dot is all below.
  // Any other is an error.
  std::span<const std::string_view> allowed_globals{};
  std::string foreign_hint{};  // what to do about another, for the error
};

// Owns the bytes and everything parsed from them.
class Pickle {
 public:
  // Throws Error(kCorrupt) naming the byte, for anything but one whole pickle of protocol 2 to 5
  // without out-of-band buffers. Memory grows with bytes.size() alone, whatever lengths they claim.
  static Pickle parse(std::string bytes, const PickleOptions& options);

  Pickle(Pickle&&) noexcept;
  Pickle& operator=(Pickle&&) noexcept;
  ~Pickle();

  PickleValue root() const;
  const std::string& source() const;
  std::size_t memory_bytes() const;

 private:
  explicit Pickle(std::unique_ptr<detail::PickleNodes> nodes);

  // Values point here, so moving a Pickle keeps them valid.
  std::unique_ptr<detail::PickleNodes> nodes_;
};

// A tuple or list of ints, or a torch.Size of one. Nothing if it is anything else or has more than
// kMaxRank dimensions.
std::optional<Dims> as_size(PickleValue value);

}  // namespace ferry::distckpt
