#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_nodes.h"
#include "distckpt/formats/torch_save/pickle_opcodes.h"

namespace ferry::distckpt::detail {
namespace {

constexpr std::size_t kMaxGlobals = 10'000;
constexpr int kMaxProtocol = 5;

// Python's "surrogatepass": lone surrogates count as valid, since its pickles hold them.
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

// Python's pickle machine, with values in place of objects.
class Parser {
 public:
  Parser(PickleNodes& nodes, const PickleOptions& options)
      : nodes_(nodes), bytes_(nodes.bytes), options_(options) {}

  void run() {
    require(bytes_.size() <= std::numeric_limits<std::uint32_t>::max(), ErrorKind::kCorrupt,
            "{}: a pickle of {} bytes; this reader takes up to 4 GiB", nodes_.source,
            bytes_.size());
    if (bytes_.size() < 2 || bytes_[0] != '\x80') {
      fail(ErrorKind::kCorrupt, "{}: no pickle of protocol 2 or later begins at byte {}",
           nodes_.source, nodes_.first_byte);
    }
    // A typical .metadata has a cell in eight bytes.
    nodes_.cells.reserve(bytes_.size() / 8 + 16);
    while (!is_done_) step();
  }

 private:
  void step();

  [[noreturn]] void corrupt(std::string_view what) const {
    fail(ErrorKind::kCorrupt, "{}: the pickle {} at byte {}", nodes_.source, what,
         nodes_.first_byte + static_cast<std::int64_t>(opcode_));
  }

  // Source bytes.
  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - position_) corrupt("is cut short");
    const std::string_view taken = bytes_.substr(position_, static_cast<std::size_t>(count));
    position_ += taken.size();
    return taken;
  }
  template <typename T>
  T take_as() {
    return load<T>(take(sizeof(T)).data());
  }
  std::string_view take_line() {
    const std::size_t end = bytes_.find('\n', position_);
    if (end == std::string_view::npos) corrupt("has a line without an end");
    const std::string_view line = take(end - position_);
    ++position_;
    return line;
  }

  // The stack. What lies below the last mark is out of reach until the mark is taken.
  void push(Cell cell) { stack_.push_back(cell); }
  void push_at(PickleKind kind) { push(cell_of(kind, opcode_)); }
  Cell pop() {
    need(1);
    const Cell cell = stack_.back();
    stack_.pop_back();
    return cell;
  }
  Cell& top() {
    need(1);
    return stack_.back();
  }
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  void need(std::size_t count) const {
    if (stack_.size() - floor() < count) corrupt("takes a value that is not there");
  }
  // The index of the first value above the last mark. The caller truncates the stack to that.
  std::size_t pop_mark() {
    if (marks_.empty()) corrupt("takes a mark that is not there");
    const std::size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }
  std::span<const Cell> above(std::size_t mark) const { return std::span(stack_).subspan(mark); }

  // The memo.
  void memoise(std::uint64_t index) {
    const Cell cell = top();
    // Python counts up from 0, so an index beyond the number of bytes is no index.
    if (index >= bytes_.size()) corrupt("memoises under an absurd number");
    if (index >= memo_.size()) memo_.resize(static_cast<std::size_t>(index) + 1, kAbsent);
    if (memo_[index] == kAbsent) ++memo_count_;
    memo_[index] = cell;
  }
  void recall(std::uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kAbsent) corrupt("recalls what it never memoised");
    push(memo_[index]);
  }

  // Containers.
  // Growing lists leave up to four cells behind for each value, and sets repeat what they are made
  // of. More comes only of copies made over and over.
  void check_room(std::uint64_t count) const {
    constexpr std::uint64_t kMaxCellsPerByte = 8;
    if (nodes_.cells.size() + count > kMaxCellsPerByte * bytes_.size() + 16) {
      corrupt("holds more values than its bytes can spell");
    }
  }
  Cell make_tuple(std::span<const Cell> elements) {
    if (elements.empty()) return kEmptyTupleCell;
    check_room(elements.size() + 1);
    const Cell cell = cell_of(PickleKind::kTuple, nodes_.cells.size());
    nodes_.cells.push_back(elements.size());
    nodes_.cells.insert(nodes_.cells.end(), elements.begin(), elements.end());
    return cell;
  }
  Cell make_sequence(PickleKind kind, std::span<const Cell> cells = {}) {
    const Cell cell = cell_of(kind, nodes_.sequences.size());
    nodes_.sequences.emplace_back();
    append(cell, cells);
    return cell;
  }
  void append(Cell sequence, std::span<const Cell> cells);
  void push_tuple(std::size_t count) {
    need(count);
    const Cell tuple = make_tuple(above(stack_.size() - count));
    stack_.resize(stack_.size() - count);
    push(tuple);
  }

  Cell make_object(Cell class_name, Cell args) {
    const Cell cell = cell_of(PickleKind::kObject, nodes_.objects.size());
    nodes_.objects.push_back({class_name, args, kNoneCell});
    return cell;
  }
  // The dict or list that SETITEMS or APPENDS fill: the target, or one that an object carries.
  Cell fillable(Cell target, PickleKind kind) {
    if (kind_of(target) == kind) return target;
    if (kind_of(target) != PickleKind::kObject) {
      corrupt(kind == PickleKind::kDict ? "sets items of what is not a dict"
                                        : "appends to what is not a list");
    }
    ObjectExtras& extras = nodes_.extras[payload_of(target)];
    Cell& cell = kind == PickleKind::kDict ? extras.items : extras.appended;
    if (cell == kNoneCell) cell = make_sequence(kind);
    return cell;
  }

  // Opcodes with more to them.
  void check_protocol(int protocol) const {
    if (protocol < 2 || protocol > kMaxProtocol) {
      corrupt(fmt::format("is of protocol {}", protocol));
    }
  }
  void push_string(std::uint64_t length) {
    if (!is_utf8(take(length))) corrupt("has a string that is not UTF-8");
    push_at(PickleKind::kString);
  }
  void push_bytes(std::uint64_t length) {
    take(length);
    push_at(PickleKind::kBytes);
  }
  void push_int(std::int64_t value) {
    push(cell_of(PickleKind::kInt, static_cast<std::uint64_t>(value)));
  }
  void push_long(std::uint64_t length);
  void check_items(std::span<const Cell> cells) const;
  void collect(unsigned char op);
  void fill(unsigned char op, std::size_t first);
  void push_global(std::string_view module, std::string_view name);
  void stack_global();
  void reduce();
  void new_object();
  void build();
  void stop();

  PickleNodes& nodes_;
  const std::string_view bytes_;
  const PickleOptions& options_;
  std::size_t position_ = 0;
  std::size_t opcode_ = 0;  // where the opcode at hand stands
  bool is_done_ = false;

  std::vector<Cell> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Cell> memo_;
  std::uint64_t memo_count_ = 0;
  std::unordered_map<std::string_view, std::uint64_t> global_index_;
};

void Parser::append(Cell sequence_cell, std::span<const Cell> cells) {
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

void Parser::push_long(std::uint64_t length) {
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
void Parser::check_items(std::span<const Cell> cells) const {
  if (cells.size() % 2 != 0) corrupt("has a key without a value");
  for (std::size_t i = 0; i < cells.size(); i += 2) {
    const auto kind = kind_of(cells[i]);
    if (kind == PickleKind::kDict || kind == PickleKind::kList || kind == PickleKind::kSet) {
      corrupt("has a key that cannot be one");
    }
  }
}

// Makes one value of those above the last mark.
void Parser::collect(unsigned char op) {
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

// The values from `first` on go into the container below them.
void Parser::fill(unsigned char op, std::size_t first) {
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

// True if Python could import it. A line break in a name would be the end of it where the global is
// written again, and what follows would be opcodes.
bool is_dotted_name(std::string_view text) {
  const bool has_control =
      std::ranges::any_of(text, [](char c) { return (c >= 0 && c < 0x20) || c == 0x7F; });
  return !has_control && is_utf8(text) && !text.starts_with('.') && !text.ends_with('.') &&
         text.find("..") == std::string_view::npos;
}

void Parser::push_global(std::string_view module, std::string_view name) {
  const std::string full = fmt::format("{}.{}", module, name);
  if (full.size() > kMaxGlobalName || !is_dotted_name(full)) {
    corrupt("has a global without a proper name");
  }
  auto found = global_index_.find(full);
  if (found == global_index_.end()) {
    const bool is_allowed =
        std::ranges::any_of(options_.allowed_globals, [&](std::string_view allowed) {
          return allowed.ends_with('.') ? full.starts_with(allowed) : full == allowed;
        });
    if (!is_allowed) {
      throw Error(ErrorKind::kCorrupt,
                  fmt::format("{}: the pickle names {} at byte {}, which is outside the closed set "
                              "that is read (nothing was executed)",
                              nodes_.source, printable(full, 200),
                              nodes_.first_byte + static_cast<std::int64_t>(opcode_)),
                  options_.foreign_hint);
    }
    if (nodes_.globals.size() == kMaxGlobals) corrupt("names too many globals");
    nodes_.globals.push_back(full);
    found = global_index_.emplace(nodes_.globals.back(), nodes_.globals.size() - 1).first;
  }
  push(cell_of(PickleKind::kGlobal, found->second));
}

void Parser::stack_global() {
  const Cell name = pop();
  const Cell module = pop();
  if (kind_of(name) != PickleKind::kString || kind_of(module) != PickleKind::kString) {
    corrupt("has a global without a proper name");
  }
  push_global(nodes_.text_at(payload_of(module)), nodes_.text_at(payload_of(name)));
}

void Parser::reduce() {
  const Cell args = pop();
  const Cell function = pop();
  if (kind_of(function) != PickleKind::kGlobal || kind_of(args) != PickleKind::kTuple) {
    corrupt("calls what is not a global with a tuple");
  }
  const std::string_view name = nodes_.globals[payload_of(function)];
  const auto inside = nodes_.inside(args);
  if (name == "__builtin__.getattr" || name == "builtins.getattr") {
    // A class inside a class: a name again, of the closed set like every other.
    const bool names = inside.size() == 2 && kind_of(inside[0]) == PickleKind::kGlobal &&
                       kind_of(inside[1]) == PickleKind::kString;
    if (!names) corrupt("takes an attribute of what is not a global");
    push_global(nodes_.globals[payload_of(inside[0])], nodes_.text_at(payload_of(inside[1])));
  } else if (inside.empty() && (name == "collections.OrderedDict" || name == "builtins.dict" ||
                                name == "__builtin__.dict")) {
    push(make_sequence(PickleKind::kDict));
  } else if (inside.size() <= 1 && (name == "builtins.set" || name == "builtins.frozenset" ||
                                    name == "__builtin__.set" || name == "__builtin__.frozenset")) {
    std::vector<Cell> elements;
    if (!inside.empty()) {
      const Cell from = inside[0];
      if (kind_of(from) != PickleKind::kList && kind_of(from) != PickleKind::kTuple) {
        corrupt("makes a set of what is not a list");
      }
      const auto inner = nodes_.inside(from);
      elements.assign(inner.begin(), inner.end());
    }
    push(make_sequence(PickleKind::kSet, elements));
  } else {
    push(make_object(function, args));
  }
}

void Parser::new_object() {
  const Cell args = pop();
  const Cell class_name = pop();
  if (kind_of(class_name) != PickleKind::kGlobal || kind_of(args) != PickleKind::kTuple) {
    corrupt("instantiates what is not a global with a tuple");
  }
  push(make_object(class_name, args));
}

void Parser::build() {
  Cell state = pop();
  const Cell target = top();
  // An OrderedDict may carry attributes (torch's _metadata): they say nothing about its items.
  if (kind_of(target) == PickleKind::kDict) return;
  if (kind_of(target) != PickleKind::kObject) corrupt("sets the state of what is not an object");
  // Objects with __slots__ have (None or {}, {slot: value}).
  if (kind_of(state) == PickleKind::kTuple) {
    const auto inside = nodes_.inside(state);
    if (inside.size() == 2) {
      const Cell attributes = inside[0];
      const Cell slots = inside[1];
      const bool has_attributes =
          attributes != kNoneCell &&
          (kind_of(attributes) != PickleKind::kDict || !nodes_.inside(attributes).empty());
      if (!has_attributes && kind_of(slots) == PickleKind::kDict) state = slots;
    }
  }
  nodes_.objects[payload_of(target)].state = state;
}

void Parser::stop() {
  nodes_.root = pop();
  if (!stack_.empty() || !marks_.empty()) corrupt("stops with values left over");
  if (position_ != bytes_.size()) corrupt("stops before its end");
  is_done_ = true;
}

// One opcode.
void Parser::step() {
  opcode_ = position_;
  if (position_ == bytes_.size()) corrupt("is cut short");
  const auto op = static_cast<unsigned char>(bytes_[position_++]);
  switch (op) {
    case opcode::kProto:
      return check_protocol(take_as<std::uint8_t>());
    case opcode::kFrame:  // how far the next reads reach: a promise, no more
      if (take_as<std::uint64_t>() > bytes_.size() - position_) corrupt("is cut short");
      return;
    case opcode::kStop:
      return stop();

    case opcode::kNone:
      return push(kNoneCell);
    case opcode::kNewTrue:
      return push(cell_of(PickleKind::kBool, 1));
    case opcode::kNewFalse:
      return push(cell_of(PickleKind::kBool, 0));
    case opcode::kBinInt1:
      return push_int(take_as<std::uint8_t>());
    case opcode::kBinInt2:
      return push_int(take_as<std::uint16_t>());
    case opcode::kBinInt:
      return push_int(take_as<std::int32_t>());
    case opcode::kLong1:
      return push_long(take_as<std::uint8_t>());
    case opcode::kLong4:
      return push_long(take_as<std::uint32_t>());
    case opcode::kBinFloat:
      take(8);
      return push_at(PickleKind::kFloat);
    case opcode::kShortBinUnicode:
      return push_string(take_as<std::uint8_t>());
    case opcode::kBinUnicode:
      return push_string(take_as<std::uint32_t>());
    case opcode::kBinUnicode8:
      return push_string(take_as<std::uint64_t>());
    case opcode::kShortBinString:
    case opcode::kShortBinBytes:
      return push_bytes(take_as<std::uint8_t>());
    case opcode::kBinString:
    case opcode::kBinBytes:
      return push_bytes(take_as<std::uint32_t>());
    case opcode::kBinBytes8:
    case opcode::kByteArray8:
      return push_bytes(take_as<std::uint64_t>());

    case opcode::kEmptyTuple:
      return push(kEmptyTupleCell);
    case opcode::kTuple1:
      return push_tuple(1);
    case opcode::kTuple2:
      return push_tuple(2);
    case opcode::kTuple3:
      return push_tuple(3);
    case opcode::kEmptyList:
      return push(make_sequence(PickleKind::kList));
    case opcode::kEmptyDict:
      return push(make_sequence(PickleKind::kDict));
    case opcode::kEmptySet:
      return push(make_sequence(PickleKind::kSet));

    case opcode::kMark:
      return marks_.push_back(stack_.size());
    case opcode::kTuple:
    case opcode::kList:
    case opcode::kDict:
    case opcode::kFrozenSet:
      return collect(op);
    case opcode::kAppend:
    case opcode::kSetItem:
      need(op == opcode::kAppend ? 2 : 3);
      return fill(op, stack_.size() - (op == opcode::kAppend ? 1 : 2));
    case opcode::kAppends:
    case opcode::kSetItems:
    case opcode::kAddItems: {
      const std::size_t mark = pop_mark();
      if (mark == floor()) corrupt("takes a value that is not there");
      return fill(op, mark);
    }

    case opcode::kPop:
      pop();
      return;
    case opcode::kPopMark:
      return stack_.resize(pop_mark());
    case opcode::kDup:
      return push(Cell{top()});

    case opcode::kBinPut:
      return memoise(take_as<std::uint8_t>());
    case opcode::kLongBinPut:
      return memoise(take_as<std::uint32_t>());
    case opcode::kMemoize:
      return memoise(memo_count_);
    case opcode::kBinGet:
      return recall(take_as<std::uint8_t>());
    case opcode::kLongBinGet:
      return recall(take_as<std::uint32_t>());

    case opcode::kGlobal: {
      const std::string_view module = take_line();
      return push_global(module, take_line());
    }
    case opcode::kStackGlobal:
      return stack_global();
    case opcode::kReduce:
      return reduce();
    case opcode::kNewObj:
      return new_object();
    case opcode::kNewObjEx:
      if (kind_of(pop()) != PickleKind::kDict) corrupt("has keywords that are not a dict");
      return new_object();
    case opcode::kBuild:
      return build();
    case opcode::kBinPersId: {
      const Cell id = pop();
      nodes_.cells.push_back(id);
      return push(cell_of(PickleKind::kPersistentId, nodes_.cells.size() - 1));
    }

    default:
      corrupt(fmt::format("has opcode 0x{:02x}, which this reader does not know,", op));
  }
}

}  // namespace
}  // namespace ferry::distckpt::detail

namespace ferry::distckpt {

Pickle Pickle::parse(std::string bytes, const PickleOptions& options) {
  auto nodes = std::make_unique<detail::PickleNodes>();
  nodes->bytes = std::move(bytes);
  nodes->source = options.source;
  nodes->first_byte = options.first_byte;
  detail::Parser(*nodes, options).run();
  return Pickle(std::move(nodes));
}

}  // namespace ferry::distckpt
