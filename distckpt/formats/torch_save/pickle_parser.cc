#include "distckpt/formats/torch_save/pickle_parser.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "distckpt/formats/torch_save/pickle_opcodes.h"

namespace ferry::distckpt::detail {
namespace {

constexpr int kMaxProtocol = 5;

}  // namespace

bool is_utf8(std::string_view text) {
  std::size_t i = 0;
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  while (i < text.size()) {
    if (i + 8 <= text.size() && (load<std::uint64_t>(&text[i]) & 0x8080808080808080) == 0) {
      i += 8;
      continue;
    }
    const unsigned char lead = byte(i);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const std::size_t length = lead < 0xC2   ? 0
                               : lead < 0xE0 ? 2
                               : lead < 0xF0 ? 3
                               : lead < 0xF5 ? 4
                                             : 0;
    if (length == 0 || length > text.size() - i) return false;
    const unsigned char second = byte(i + 1);
    if (lead == 0xE0 && second < 0xA0) return false;  // overlong
    if (lead == 0xF0 && second < 0x90) return false;
    if (lead == 0xF4 && second > 0x8F) return false;  // beyond U+10FFFF
    for (std::size_t k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return false;
    }
    i += length;
  }
  return true;
}

void PickleParser::run() {
  require(bytes_.size() <= std::numeric_limits<std::uint32_t>::max(), ErrorKind::kCorrupt,
          "{}: a pickle of {} bytes; this reader takes up to 4 GiB", nodes_.source, bytes_.size());
  if (bytes_.size() < 2 || bytes_[0] != '\x80') {
    fail(ErrorKind::kCorrupt, "{}: no pickle of protocol 2 or later begins at byte {}",
         nodes_.source, nodes_.first_byte);
  }
  // A typical .metadata has a cell in eight bytes.
  nodes_.cells.reserve(bytes_.size() / 8 + 16);
  static const Steps steps = make_steps();
  while (!is_done_) step(steps);
}

void PickleParser::check_protocol(int protocol) const {
  if (protocol < 2 || protocol > kMaxProtocol) {
    corrupt(fmt::format("is of protocol {}", protocol));
  }
}

void PickleParser::push_string(std::uint64_t length) {
  if (!is_utf8(take(length))) corrupt("has a string that is not UTF-8");
  push_at(PickleKind::kString);
}

void PickleParser::append(Cell sequence_cell, std::span<const Cell> cells) {
  Sequence& sequence = nodes_.sequences[payload_of(sequence_cell)];
  const std::uint64_t count = sequence.count + cells.size();
  if (count > std::numeric_limits<std::uint32_t>::max())
    corrupt("fills a list beyond 4 Gi elements");
  std::vector<Cell>& arena = nodes_.cells;
  if (count > sequence.capacity) {
    // The first fill is mostly the last. What grows again doubles, so that growing stays linear.
    const std::uint64_t doubled = std::min<std::uint64_t>(
        std::uint64_t{2} * sequence.capacity, std::numeric_limits<std::uint32_t>::max());
    const std::uint64_t capacity = std::max(count, doubled);
    const std::uint64_t first = arena.size();
    check_room(capacity);
    arena.resize(static_cast<std::size_t>(first + capacity), kNoneCell);
    std::copy_n(arena.begin() + static_cast<std::ptrdiff_t>(sequence.first), sequence.count,
                arena.begin() + static_cast<std::ptrdiff_t>(first));
    sequence.first = first;
    sequence.capacity = static_cast<std::uint32_t>(capacity);
  }
  std::ranges::copy(cells,
                    arena.begin() + static_cast<std::ptrdiff_t>(sequence.first + sequence.count));
  sequence.count = static_cast<std::uint32_t>(count);
}

void PickleParser::push_long(std::uint64_t length) {
  const std::string_view digits = take(length);
  if (digits.size() > 8) {
    push_at(PickleKind::kBigInt);
  } else if (digits.empty()) {
    push_int(0);
  } else {
    const Cell wide = static_cast<Cell>(opcode_) << 4 | kWideInt;
    const std::int64_t value = nodes_.int_of(wide);
    if (value << 4 >> 4 == value) {
      push_int(value);
    } else {
      push(wide);
    }
  }
}

// Keys and values in turns, the keys of a kind that Python would take.
void PickleParser::check_items(std::span<const Cell> cells) const {
  if (cells.size() % 2 != 0) corrupt("has a key without a value");
  for (std::size_t i = 0; i < cells.size(); i += 2) {
    const auto kind = kind_of(cells[i]);
    if (kind == PickleKind::kDict || kind == PickleKind::kList || kind == PickleKind::kSet) {
      corrupt("has a key that cannot be one");
    }
  }
}

// Makes one value of those above the last mark.
void PickleParser::collect(unsigned char op) {
  const std::size_t mark = pop_mark();
  const std::span<const Cell> cells = above(mark);
  if (op == opcode::kDict) check_items(cells);
  const Cell made = op == opcode::kTuple  ? make_tuple(cells)
                    : op == opcode::kList ? make_sequence(PickleKind::kList, cells)
                    : op == opcode::kDict ? make_sequence(PickleKind::kDict, cells)
                                          : make_sequence(PickleKind::kSet, cells);
  stack_.resize(mark);
  push(made);
}

void PickleParser::fill_with(unsigned char op, std::size_t count) {
  need(count + 1);
  fill(op, stack_.size() - count);
}

void PickleParser::fill_above_mark(unsigned char op) {
  const std::size_t mark = pop_mark();
  if (mark == floor()) corrupt("takes a value that is not there");
  fill(op, mark);
}

// The values from `first` on go into the container below them.
void PickleParser::fill(unsigned char op, std::size_t first) {
  const std::span<const Cell> cells = above(first);
  const Cell target = stack_[first - 1];
  if (op == opcode::kAddItems) {
    if (kind_of(target) != PickleKind::kSet) corrupt("adds to what is not a set");
    append(target, cells);
  } else if (op == opcode::kAppend || op == opcode::kAppends) {
    append(fillable(target, PickleKind::kList), cells);
  } else {
    check_items(cells);
    append(fillable(target, PickleKind::kDict), cells);
  }
  stack_.resize(first);
}

// One opcode.
void PickleParser::step(const Steps& steps) {
  opcode_ = position_;
  if (position_ == bytes_.size()) corrupt("is cut short");
  steps[static_cast<unsigned char>(bytes_[position_++])](*this);
}

PickleParser::Steps PickleParser::make_steps() {
  Steps steps{};
  steps.fill([](PickleParser& p) {
    p.corrupt(fmt::format("has opcode 0x{:02x}, which this reader does not know,",
                          static_cast<unsigned char>(p.bytes_[p.opcode_])));
  });
  steps[opcode::kProto] = [](PickleParser& p) { p.check_protocol(p.take_as<std::uint8_t>()); };
  // A frame says how far the next reads reach: a promise, no more.
  steps[opcode::kFrame] = [](PickleParser& p) {
    if (p.take_as<std::uint64_t>() > p.bytes_.size() - p.position_) p.corrupt("is cut short");
  };
  steps[opcode::kStop] = [](PickleParser& p) { p.stop(); };
  add_values(steps);
  add_texts(steps);
  add_containers(steps);
  add_stack_and_memo(steps);
  add_objects(steps);
  return steps;
}

void PickleParser::add_values(Steps& steps) {
  steps[opcode::kNone] = [](PickleParser& p) { p.push(kNoneCell); };
  steps[opcode::kNewTrue] = [](PickleParser& p) { p.push(cell_of(PickleKind::kBool, 1)); };
  steps[opcode::kNewFalse] = [](PickleParser& p) { p.push(cell_of(PickleKind::kBool, 0)); };
  steps[opcode::kBinInt1] = [](PickleParser& p) { p.push_int(p.take_as<std::uint8_t>()); };
  steps[opcode::kBinInt2] = [](PickleParser& p) { p.push_int(p.take_as<std::uint16_t>()); };
  steps[opcode::kBinInt] = [](PickleParser& p) { p.push_int(p.take_as<std::int32_t>()); };
  steps[opcode::kLong1] = [](PickleParser& p) { p.push_long(p.take_as<std::uint8_t>()); };
  steps[opcode::kLong4] = [](PickleParser& p) { p.push_long(p.take_as<std::uint32_t>()); };
  steps[opcode::kBinFloat] = [](PickleParser& p) {
    p.take(8);
    p.push_at(PickleKind::kFloat);
  };
}

void PickleParser::add_texts(Steps& steps) {
  steps[opcode::kShortBinUnicode] = [](PickleParser& p) {
    p.push_string(p.take_as<std::uint8_t>());
  };
  steps[opcode::kBinUnicode] = [](PickleParser& p) { p.push_string(p.take_as<std::uint32_t>()); };
  steps[opcode::kBinUnicode8] = [](PickleParser& p) { p.push_string(p.take_as<std::uint64_t>()); };
  steps[opcode::kShortBinString] = steps[opcode::kShortBinBytes] = [](PickleParser& p) {
    p.push_bytes(p.take_as<std::uint8_t>());
  };
  steps[opcode::kBinString] =
      steps[opcode::kBinBytes] = [](PickleParser& p) { p.push_bytes(p.take_as<std::uint32_t>()); };
  steps[opcode::kBinBytes8] = steps[opcode::kByteArray8] = [](PickleParser& p) {
    p.push_bytes(p.take_as<std::uint64_t>());
  };
}

void PickleParser::add_containers(Steps& steps) {
  steps[opcode::kEmptyTuple] = [](PickleParser& p) { p.push(kEmptyTupleCell); };
  steps[opcode::kTuple1] = [](PickleParser& p) { p.push_tuple(1); };
  steps[opcode::kTuple2] = [](PickleParser& p) { p.push_tuple(2); };
  steps[opcode::kTuple3] = [](PickleParser& p) { p.push_tuple(3); };
  steps[opcode::kEmptyList] = [](PickleParser& p) { p.push(p.make_sequence(PickleKind::kList)); };
  steps[opcode::kEmptyDict] = [](PickleParser& p) { p.push(p.make_sequence(PickleKind::kDict)); };
  steps[opcode::kEmptySet] = [](PickleParser& p) { p.push(p.make_sequence(PickleKind::kSet)); };
  steps[opcode::kTuple] = [](PickleParser& p) { p.collect(opcode::kTuple); };
  steps[opcode::kList] = [](PickleParser& p) { p.collect(opcode::kList); };
  steps[opcode::kDict] = [](PickleParser& p) { p.collect(opcode::kDict); };
  steps[opcode::kFrozenSet] = [](PickleParser& p) { p.collect(opcode::kFrozenSet); };
  steps[opcode::kAppend] = [](PickleParser& p) { p.fill_with(opcode::kAppend, 1); };
  steps[opcode::kSetItem] = [](PickleParser& p) { p.fill_with(opcode::kSetItem, 2); };
  steps[opcode::kAppends] = [](PickleParser& p) { p.fill_above_mark(opcode::kAppends); };
  steps[opcode::kSetItems] = [](PickleParser& p) { p.fill_above_mark(opcode::kSetItems); };
  steps[opcode::kAddItems] = [](PickleParser& p) { p.fill_above_mark(opcode::kAddItems); };
}

void PickleParser::add_stack_and_memo(Steps& steps) {
  steps[opcode::kMark] = [](PickleParser& p) { p.marks_.push_back(p.stack_.size()); };
  steps[opcode::kPop] = [](PickleParser& p) { p.pop(); };
  steps[opcode::kPopMark] = [](PickleParser& p) { p.stack_.resize(p.pop_mark()); };
  steps[opcode::kDup] = [](PickleParser& p) { p.push(Cell{p.top()}); };
  steps[opcode::kBinPut] = [](PickleParser& p) { p.memoise(p.take_as<std::uint8_t>()); };
  steps[opcode::kLongBinPut] = [](PickleParser& p) { p.memoise(p.take_as<std::uint32_t>()); };
  steps[opcode::kMemoize] = [](PickleParser& p) { p.memoise(p.memo_count_); };
  steps[opcode::kBinGet] = [](PickleParser& p) { p.recall(p.take_as<std::uint8_t>()); };
  steps[opcode::kLongBinGet] = [](PickleParser& p) { p.recall(p.take_as<std::uint32_t>()); };
}

void PickleParser::add_objects(Steps& steps) {
  steps[opcode::kGlobal] = [](PickleParser& p) {
    const std::string_view module = p.take_line();
    p.push_global(module, p.take_line());
  };
  steps[opcode::kStackGlobal] = [](PickleParser& p) { p.stack_global(); };
  steps[opcode::kReduce] = [](PickleParser& p) { p.reduce(); };
  steps[opcode::kNewObj] = [](PickleParser& p) { p.new_object(); };
  steps[opcode::kNewObjEx] = [](PickleParser& p) {
    if (kind_of(p.pop()) != PickleKind::kDict) p.corrupt("has keywords that are not a dict");
    p.new_object();
  };
  steps[opcode::kBuild] = [](PickleParser& p) { p.build(); };
  steps[opcode::kBinPersId] = [](PickleParser& p) { p.push_persistent_id(); };
}

}  // namespace ferry::distckpt::detail

namespace ferry::distckpt {

Pickle Pickle::parse(std::string bytes, const PickleOptions& options) {
  auto nodes = std::make_unique<detail::PickleNodes>();
  nodes->bytes = std::move(bytes);
  nodes->source = options.source;
  nodes->first_byte = options.first_byte;
  detail::PickleParser(*nodes, options).run();
  return Pickle(std::move(nodes));
}

}  // namespace ferry::distckpt
