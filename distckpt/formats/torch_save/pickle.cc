#include "distckpt/formats/torch_save/pickle.h"

#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/pickle_nodes.h"

namespace ferry::distckpt {
namespace detail {

std::string printable(std::string_view text, std::size_t max_length) {
  std::string shown;
  for (const char c : text.substr(0, max_length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F) {
      shown.push_back(c);
    } else {
      shown += fmt::format("\\x{:02x}", byte);
    }
  }
  if (text.size() > max_length) shown += "...";
  return shown;
}

void PickleNodes::describe(Cell cell, std::size_t max_length, int depth, std::string& out) const {
  const auto is_full = [&] { return out.size() >= max_length; };
  if (is_full()) return;
  if (depth > 8) {
    out += "...";
    return;
  }
  const auto list = [&](std::string_view open, std::span<const Cell> all, std::string_view close) {
    out += open;
    for (std::size_t i = 0; i < all.size() && !is_full(); ++i) {
      if (i > 0) out += ", ";
      describe(all[i], max_length, depth + 1, out);
    }
    out += close;
  };
  const std::uint64_t payload = payload_of(cell);
  switch (kind_of(cell)) {
    case PickleKind::kNone:
      out += "None";
      break;
    case PickleKind::kBool:
      out += payload != 0 ? "True" : "False";
      break;
    case PickleKind::kInt:
      out += fmt::format("{}", int_of(cell));
      break;
    case PickleKind::kBigInt:
      out += fmt::format("an int of {} bytes", text_at(payload).size());
      break;
    case PickleKind::kFloat:
      out += fmt::format("{}", float_at(payload));
      break;
    case PickleKind::kString:
      out += fmt::format("'{}'", printable(text_at(payload), max_length - out.size()));
      break;
    case PickleKind::kBytes:
      out += fmt::format("b'{}'", printable(text_at(payload), max_length - out.size()));
      break;
    case PickleKind::kList:
      list("[", inside(cell), "]");
      break;
    case PickleKind::kTuple:
      list("(", inside(cell), inside(cell).size() == 1 ? ",)" : ")");
      break;
    case PickleKind::kSet:
      list("{", inside(cell), "}");
      break;
    case PickleKind::kDict: {
      const auto items = inside(cell);
      out += "{";
      for (std::size_t i = 0; i < items.size() && !is_full(); i += 2) {
        if (i > 0) out += ", ";
        describe(items[i], max_length, depth + 1, out);
        out += ": ";
        describe(items[i + 1], max_length, depth + 1, out);
      }
      out += "}";
      break;
    }
    case PickleKind::kGlobal:
      out += printable(globals[payload], kMaxGlobalName);
      break;
    case PickleKind::kObject: {
      const Object& object = objects[payload];
      out += printable(globals[payload_of(object.class_name)], kMaxGlobalName);
      list("(", inside(object.args), ")");
      if (object.state != kNoneCell) {
        out += " with state ";
        describe(object.state, max_length, depth + 1, out);
      }
      break;
    }
    case PickleKind::kPersistentId:
      out += "a reference to ";
      describe(cells[payload], max_length, depth + 1, out);
      break;
  }
}

}  // namespace detail

std::string_view to_string(PickleKind kind) {
  static constexpr std::string_view kNames[] = {
      "None",   "bool",         "int",   "int beyond 64 bits",
      "float",  "string",       "bytes", "list",
      "tuple",  "dict",         "set",   "global",
      "object", "persistent id"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(PickleKind::kPersistentId) + 1);
  return kNames[static_cast<std::size_t>(kind)];
}

PickleKind PickleValue::kind() const {
  return detail::kind_of(cell_);
}

void PickleValue::fail_expected(std::string_view expected) const {
  fail(ErrorKind::kCorrupt, "{}: the pickle holds {} where {} is expected", nodes_->source,
       describe(80), expected);
}

void PickleValue::expect(PickleKind expected) const {
  if (kind() != expected) [[unlikely]]
    fail_expected(to_string(expected));
}

bool PickleValue::as_bool() const {
  expect(PickleKind::kBool);
  return detail::payload_of(cell_) != 0;
}

std::int64_t PickleValue::as_int() const {
  expect(PickleKind::kInt);
  return nodes_->int_of(cell_);
}

double PickleValue::as_float() const {
  if (kind() == PickleKind::kInt) return static_cast<double>(as_int());
  expect(PickleKind::kFloat);
  return nodes_->float_at(detail::payload_of(cell_));
}

std::string_view PickleValue::as_string() const {
  expect(PickleKind::kString);
  return nodes_->text_at(detail::payload_of(cell_));
}

std::string_view PickleValue::as_bytes() const {
  if (kind() != PickleKind::kBigInt) expect(PickleKind::kBytes);
  return nodes_->text_at(detail::payload_of(cell_));
}

std::size_t PickleValue::size() const {
  return kind() == PickleKind::kDict ? item_cells().size() / 2 : element_cells().size();
}

PickleValue PickleValue::operator[](std::size_t index) const {
  if (kind() != PickleKind::kList) expect(PickleKind::kTuple);
  const auto cells = nodes_->inside(cell_);
  require(index < cells.size(), ErrorKind::kCorrupt,
          "{}: the pickle holds {}, of {} elements, where more than {} are expected",
          nodes_->source, describe(80), cells.size(), index);
  return {nodes_, cells[index]};
}

std::span<const std::uint64_t> PickleValue::element_cells() const {
  if (kind() != PickleKind::kList && kind() != PickleKind::kTuple && kind() != PickleKind::kSet) {
    fail_expected("list or tuple");
  }
  return nodes_->inside(cell_);
}

std::span<const std::uint64_t> PickleValue::item_cells() const {
  expect(PickleKind::kDict);
  return nodes_->inside(cell_);
}

std::optional<PickleValue> PickleValue::find(std::string_view key) const {
  if (kind() == PickleKind::kObject) {
    for (const PickleValue part : {object_state(), object_items()}) {
      if (part.kind() != PickleKind::kDict) continue;
      if (const auto found = part.find(key)) return found;
    }
    return std::nullopt;
  }
  const auto cells = item_cells();
  for (std::size_t i = cells.size(); i > 0; i -= 2) {  // last first
    const detail::Cell at = cells[i - 2];
    if (detail::kind_of(at) == PickleKind::kString &&
        nodes_->text_at(detail::payload_of(at)) == key) {
      return PickleValue(nodes_, cells[i - 1]);
    }
  }
  return std::nullopt;
}

PickleValue PickleValue::at(std::string_view key) const {
  const auto found = find(key);
  require(found.has_value(), ErrorKind::kCorrupt, "{}: the pickle holds {}, which lacks '{}'",
          nodes_->source, describe(80), key);
  return *found;
}

std::string_view PickleValue::global_name() const {
  expect(PickleKind::kGlobal);
  return nodes_->globals[detail::payload_of(cell_)];
}

std::string_view PickleValue::object_class() const {
  expect(PickleKind::kObject);
  return nodes_->globals[detail::payload_of(nodes_->objects[detail::payload_of(cell_)].class_name)];
}

PickleValue PickleValue::object_args() const {
  expect(PickleKind::kObject);
  return {nodes_, nodes_->objects[detail::payload_of(cell_)].args};
}

PickleValue PickleValue::object_state() const {
  expect(PickleKind::kObject);
  return {nodes_, nodes_->objects[detail::payload_of(cell_)].state};
}

PickleValue PickleValue::object_items() const {
  expect(PickleKind::kObject);
  const auto extras = nodes_->extras.find(detail::payload_of(cell_));
  return {nodes_, extras == nodes_->extras.end() ? detail::kNoneCell : extras->second.items};
}

PickleValue PickleValue::object_appended() const {
  expect(PickleKind::kObject);
  const auto extras = nodes_->extras.find(detail::payload_of(cell_));
  return {nodes_, extras == nodes_->extras.end() ? detail::kNoneCell : extras->second.appended};
}

bool PickleValue::is_object(std::string_view class_name) const {
  return kind() == PickleKind::kObject && object_class() == class_name;
}

PickleValue PickleValue::persistent_id() const {
  expect(PickleKind::kPersistentId);
  return {nodes_, nodes_->cells[detail::payload_of(cell_)]};
}

void PickleValue::require_tree(std::size_t max_values, int max_depth) const {
  struct Visit {
    detail::Cell cell;
    int depth;
  };
  std::vector<Visit> pending{{cell_, 1}};
  std::size_t met = 1;
  while (!pending.empty()) {
    const Visit visit = pending.back();
    pending.pop_back();
    nodes_->for_each_child(visit.cell, [&](detail::Cell child) {
      require(++met <= max_values && visit.depth < max_depth, ErrorKind::kCorrupt,
              "{}: the pickle holds {}, which has more than {} values or {} levels", nodes_->source,
              describe(80), max_values, max_depth);
      pending.push_back({child, visit.depth + 1});
    });
  }
}

std::string PickleValue::describe(std::size_t max_length) const {
  std::string out;
  nodes_->describe(cell_, max_length, 0, out);
  if (out.size() > max_length + 3) {
    out.resize(max_length);
    out += "...";
  }
  return out;
}

Pickle::Pickle(std::unique_ptr<detail::PickleNodes> nodes) : nodes_(std::move(nodes)) {}
Pickle::Pickle(Pickle&&) noexcept = default;
Pickle& Pickle::operator=(Pickle&&) noexcept = default;
Pickle::~Pickle() = default;

PickleValue Pickle::root() const {
  return nodes_->value(nodes_->root);
}
const std::string& Pickle::source() const {
  return nodes_->source;
}

std::size_t Pickle::memory_bytes() const {
  return nodes_->bytes.capacity() + nodes_->cells.capacity() * sizeof(detail::Cell) +
         nodes_->sequences.capacity() * sizeof(detail::Sequence) +
         nodes_->objects.capacity() * sizeof(detail::Object);
}

std::optional<Dims> as_size(PickleValue value) {
  if (value.is_object("torch.Size")) {
    if (value.object_args().size() != 1) return std::nullopt;
    value = value.object_args()[0];
  }
  if (value.kind() != PickleKind::kTuple && value.kind() != PickleKind::kList) return std::nullopt;
  if (value.size() > static_cast<std::size_t>(kMaxRank)) return std::nullopt;
  Dims dims;
  for (const PickleValue dim : value.elements()) {
    if (dim.kind() != PickleKind::kInt) return std::nullopt;
    dims.push_back(dim.as_int());
  }
  return dims;
}

}  // namespace ferry::distckpt
