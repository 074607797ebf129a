// Names, calls and objects of the pickle machine: a name is looked up in the closed set, and a call
// becomes a value that says what was called.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/pickle_parser.h"

namespace ferry::distckpt::detail {
namespace {

constexpr std::size_t kMaxGlobals = 10'000;

// True if Python could import it. A line break in a name would be the end of it where the global is
// written again, and what follows would be opcodes.
bool is_dotted_name(std::string_view text) {
  const bool has_control =
      std::ranges::any_of(text, [](char c) { return (c >= 0 && c < 0x20) || c == 0x7F; });
  return !has_control && is_utf8(text) && !text.starts_with('.') && !text.ends_with('.') &&
         text.find("..") == std::string_view::npos;
}

}  // namespace

void PickleParser::push_global(std::string_view module, std::string_view name) {
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

void PickleParser::stack_global() {
  const Cell name = pop();
  const Cell module = pop();
  if (kind_of(name) != PickleKind::kString || kind_of(module) != PickleKind::kString) {
    corrupt("has a global without a proper name");
  }
  push_global(nodes_.text_at(payload_of(module)), nodes_.text_at(payload_of(name)));
}

void PickleParser::reduce() {
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

void PickleParser::new_object() {
  const Cell args = pop();
  const Cell class_name = pop();
  if (kind_of(class_name) != PickleKind::kGlobal || kind_of(args) != PickleKind::kTuple) {
    corrupt("instantiates what is not a global with a tuple");
  }
  push(make_object(class_name, args));
}

void PickleParser::build() {
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

void PickleParser::push_persistent_id() {
  const Cell id = pop();
  nodes_.cells.push_back(id);
  push(cell_of(PickleKind::kPersistentId, nodes_.cells.size() - 1));
}

void PickleParser::stop() {
  nodes_.root = pop();
  if (!stack_.empty() || !marks_.empty()) corrupt("stops with values left over");
  if (position_ != bytes_.size()) corrupt("stops before its end");
  is_done_ = true;
}

}  // namespace ferry::distckpt::detail
