// The machine that reads a pickle: Python's, with values in place of objects. What bytes, stack,
// memo and containers mean is in pickle_parser.cc, what names and calls mean in pickle_objects.cc.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_nodes.h"

namespace ferry::distckpt::detail {

// True for UTF-8 as Python's "surrogatepass" takes it: lone surrogates count as valid, since its
// pickles hold them.
bool is_utf8(std::string_view text);

// Fills the nodes of one pickle. Both, and the options, must outlive it.
class PickleParser {
 public:
  PickleParser(PickleNodes& nodes, const PickleOptions& options)
      : nodes_(nodes), bytes_(nodes.bytes), options_(options) {}

  // Reads all bytes of the nodes into the nodes. Throws Error(kCorrupt) naming the byte.
  void run();

 private:
  // The work of an opcode, by its byte: see make_steps.
  using Step = void (*)(PickleParser&);
  using Steps = std::array<Step, 256>;
  static Steps make_steps();
  static void add_values(Steps& steps);
  static void add_texts(Steps& steps);
  static void add_containers(Steps& steps);
  static void add_stack_and_memo(Steps& steps);
  static void add_objects(Steps& steps);
  void step(const Steps& steps);

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
  void check_protocol(int protocol) const;
  void push_string(std::uint64_t length);
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
  void fill_with(unsigned char op, std::size_t count);  // the last `count` values
  void fill_above_mark(unsigned char op);
  void fill(unsigned char op, std::size_t first);

  // Names and calls: pickle_objects.cc.
  void push_global(std::string_view module, std::string_view name);
  void stack_global();
  void reduce();
  void new_object();
  void build();
  void push_persistent_id();
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

}  // namespace ferry::distckpt::detail
