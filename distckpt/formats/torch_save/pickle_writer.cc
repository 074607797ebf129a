#include "distckpt/formats/torch_save/pickle_writer.h"

#include <bit>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

void append_little_endian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
}

// The fewest bytes whose two's complement holds `value`.
int signed_bytes(std::int64_t value) {
  int bytes = 1;
  while (bytes < 8 && (value >> (8 * bytes - 1)) != 0 && (value >> (8 * bytes - 1)) != -1) ++bytes;
  return bytes;
}

}  // namespace

PickleWriter::PickleWriter() {
  op(opcode::kProto);
  op(2);
}

PickleWriter& PickleWriter::none() {
  op(opcode::kNone);
  return value();
}

PickleWriter& PickleWriter::boolean(bool value) {
  op(value ? opcode::kNewTrue : opcode::kNewFalse);
  return this->value();
}

PickleWriter& PickleWriter::integer(std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  if (value >= 0 && value <= 0xFF) {
    op(opcode::kBinInt1);
    append_little_endian(out_, bits, 1);
  } else if (value >= 0 && value <= 0xFFFF) {
    op(opcode::kBinInt2);
    append_little_endian(out_, bits, 2);
  } else if (value == static_cast<std::int32_t>(value)) {
    op(opcode::kBinInt);
    append_little_endian(out_, bits, 4);
  } else {
    const int bytes = signed_bytes(value);
    op(opcode::kLong1);
    op(bytes);
    append_little_endian(out_, bits, bytes);
  }
  return this->value();
}

PickleWriter& PickleWriter::real(double value) {
  op(opcode::kBinFloat);
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int i = 7; i >= 0; --i) op(static_cast<int>(bits >> (8 * i) & 0xFF));  // big endian, alone
  return this->value();
}

PickleWriter& PickleWriter::string(std::string_view text) {
  if (!recall(strings_, text)) {
    require(text.size() <= std::numeric_limits<std::uint32_t>::max(), ErrorKind::kBug,
            "pickle: a string of {} bytes", text.size());
    op(opcode::kBinUnicode);
    append_little_endian(out_, text.size(), 4);
    out_.append(text);
    memoise(strings_, text);
  }
  return value();
}

PickleWriter& PickleWriter::global(std::string_view name) {
  emit_global(name);
  return value();
}

PickleWriter& PickleWriter::begin_tuple() {
  return open(Frame::kTuple);
}

PickleWriter& PickleWriter::end_tuple() {
  end_as_tuple(close(Frame::kTuple));
  return value();
}

PickleWriter& PickleWriter::begin_list() {
  op(opcode::kEmptyList);
  return open(Frame::kList);
}

PickleWriter& PickleWriter::end_list() {
  end_marked(close(Frame::kList), opcode::kAppends);
  return value();
}

PickleWriter& PickleWriter::begin_dict() {
  op(opcode::kEmptyDict);
  return open(Frame::kDict);
}

PickleWriter& PickleWriter::end_dict() {
  end_marked(close(Frame::kDict), opcode::kSetItems);
  return value();
}

PickleWriter& PickleWriter::begin_call(std::string_view function) {
  emit_global(function);
  return open(Frame::kCall);
}

PickleWriter& PickleWriter::end_call() {
  end_as_tuple(close(Frame::kCall));
  op(opcode::kReduce);
  return value();
}

PickleWriter& PickleWriter::begin_object(std::string_view class_name) {
  emit_global(class_name);
  op(opcode::kEmptyTuple);
  op(opcode::kNewObj);
  op(opcode::kEmptyDict);
  return open(Frame::kObject);
}

PickleWriter& PickleWriter::end_object() {
  const Open object = close(Frame::kObject);
  end_marked(object, opcode::kSetItems);
  if (object.values == 0) {
    out_.pop_back();  // the empty dict: there is nothing to build
  } else {
    op(opcode::kBuild);
  }
  return value();
}

PickleWriter& PickleWriter::begin_object_with_state(std::string_view class_name) {
  emit_global(class_name);
  op(opcode::kEmptyTuple);
  op(opcode::kNewObj);
  return open(Frame::kState);
}

PickleWriter& PickleWriter::end_object_with_state() {
  const Open object = close(Frame::kState);
  require(object.values == 1, ErrorKind::kBug, "pickle: a state of {} values", object.values);
  out_.erase(object.mark, 1);
  op(opcode::kBuild);
  return value();
}

PickleWriter& PickleWriter::begin_persistent_id() {
  return open(Frame::kPersistentId);
}

PickleWriter& PickleWriter::end_persistent_id() {
  end_as_tuple(close(Frame::kPersistentId));
  op(opcode::kBinPersId);
  return value();
}

PickleWriter& PickleWriter::integers(const Dims& dims) {
  begin_tuple();
  for (const auto dim : dims) integer(dim);
  return end_tuple();
}

PickleWriter& PickleWriter::size(const Dims& dims) {
  return begin_call("torch.Size").integers(dims).end_call();
}

std::string PickleWriter::finish() {
  require(open_.empty(), ErrorKind::kBug, "pickle: {} values are still open", open_.size());
  op(opcode::kStop);
  return std::move(out_);
}

PickleWriter& PickleWriter::value() {
  if (!open_.empty()) ++open_.back().values;
  return *this;
}

PickleWriter& PickleWriter::open(Frame frame) {
  open_.push_back({.frame = frame, .mark = out_.size()});
  op(opcode::kMark);
  return *this;
}

PickleWriter::Open PickleWriter::close(Frame frame) {
  require(!open_.empty() && open_.back().frame == frame, ErrorKind::kBug,
          "pickle: an end does not match its begin");
  const Open open = open_.back();
  open_.pop_back();
  return open;
}

// Lists, dicts and attributes: what stands after MARK goes into the container before it.
void PickleWriter::end_marked(const Open& open, opcode::Opcode last) {
  require(last != opcode::kSetItems || open.values % 2 == 0, ErrorKind::kBug,
          "pickle: a key lacks its value");
  if (open.values == 0) {
    out_.pop_back();  // MARK
  } else {
    op(last);
  }
}

// Tuples of up to three values have opcodes of their own, which take no MARK.
void PickleWriter::end_as_tuple(const Open& open) {
  if (open.values > 3) {
    op(opcode::kTuple);
    return;
  }
  out_.erase(open.mark, 1);
  constexpr opcode::Opcode kShort[] = {opcode::kEmptyTuple, opcode::kTuple1, opcode::kTuple2,
                                       opcode::kTuple3};
  op(kShort[open.values]);
}

bool PickleWriter::recall(const Memo& memo, std::string_view text) {
  const auto found = memo.find(text);
  if (found == memo.end()) return false;
  const bool is_short = found->second <= 0xFF;
  op(is_short ? opcode::kBinGet : opcode::kLongBinGet);
  append_little_endian(out_, found->second, is_short ? 1 : 4);
  return true;
}

void PickleWriter::memoise(Memo& memo, std::string_view text) {
  const auto index = static_cast<std::uint32_t>(strings_.size() + globals_.size());
  memo.emplace(text, index);
  const bool is_short = index <= 0xFF;
  op(is_short ? opcode::kBinPut : opcode::kLongBinPut);
  append_little_endian(out_, index, is_short ? 1 : 4);
}

void PickleWriter::emit_global(std::string_view name) {
  if (recall(globals_, name)) return;
  const auto dot = name.rfind('.');
  require(dot != std::string_view::npos && name.find('\n') == std::string_view::npos,
          ErrorKind::kBug, "pickle: {} names no module", name);
  op(opcode::kGlobal);
  out_.append(name.substr(0, dot)).append("\n");
  out_.append(name.substr(dot + 1)).append("\n");
  memoise(globals_, name);
}

}  // namespace ferry::distckpt
